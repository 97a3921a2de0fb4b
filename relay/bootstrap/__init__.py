"""The composition root: settings in, wired parts out. Nothing else builds an engine, a client or a sender."""
