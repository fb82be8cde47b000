"""run.toml: everything a person may decide about a run and about this peer, in one tree of plain values."""
