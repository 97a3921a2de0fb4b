"""Pure logic: no I/O, no clock, no randomness of its own. `now` and random numbers are arguments."""
