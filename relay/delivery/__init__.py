"""The story of a batch: claim, gate, build, send, record."""
