"""Training while a member is cut off from the quorum, and the merge of that work."""
