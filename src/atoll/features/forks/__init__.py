"""Detection of two branches of one run, and a poll of which branch most members follow."""
