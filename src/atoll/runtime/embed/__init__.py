"""Atoll inside a user's training loop: `found`, `join`, `Run`, and the peer process beside it."""
