"""Sum checks: random blocks of a combined part are opened and recomputed."""
