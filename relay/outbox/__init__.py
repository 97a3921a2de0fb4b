"""From committed rows to hints on a Redis Stream, and back to ids in a worker."""
