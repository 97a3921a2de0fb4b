"""What every long-running process has: a heartbeat, a health port, failpoints for the tests."""
