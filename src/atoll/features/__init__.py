"""Optional features of a run that no check depends on. Each feature is one folder."""
