"""Byzantine members of the simulator."""
