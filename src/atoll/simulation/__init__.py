"""Deterministic simulator: real peers under a virtual clock, with seeded links and always-on checkers."""
