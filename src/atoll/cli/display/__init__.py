"""Output of long commands and running peers: views for logs, and progress on a terminal."""
