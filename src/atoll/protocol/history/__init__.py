"""History of a run: a chain of vertices, each certified by the members of its parent."""
