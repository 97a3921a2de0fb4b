"""Relay: outbound webhook delivery that survives what goes wrong."""

__version__ = "0.1.0"
