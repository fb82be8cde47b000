"""One training round: its context, the local update, commitments, the proposal and its outcome."""
