"""The history of a run: vertices that follow each other, each certified by the members of the one before."""
