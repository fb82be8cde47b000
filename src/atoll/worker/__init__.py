"""Worker toolkit: what every executor of tasks shares, below the capabilities that add handlers to it."""
