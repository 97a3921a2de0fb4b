"""Postgres, and nothing else. Functions take a connection; the caller owns the transaction."""
