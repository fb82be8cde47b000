"""Loss scoring: members measure how much an update lowers the loss on held-out samples."""
