"""The virtual world: the same peers under a virtual clock, seeded links and always-on checkers."""
