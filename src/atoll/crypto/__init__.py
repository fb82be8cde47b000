"""Identity and secrecy as pure functions on bytes: no I/O, no clock, randomness only as an argument."""
