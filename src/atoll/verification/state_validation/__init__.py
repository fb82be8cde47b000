"""State validation: members evaluate agreed states on held-out samples."""
