"""Commands that answer from a folder where no peer is running."""
