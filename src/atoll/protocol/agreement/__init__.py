"""Agreement on one vertex per round: the engine interface and two engines."""
