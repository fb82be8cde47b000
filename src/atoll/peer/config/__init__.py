"""run.toml: all settings of a run and of the local peer as one tree of plain values."""
