"""Measures a Relay: starts one, or part of one, gives it work, and counts what became of every delivery."""
