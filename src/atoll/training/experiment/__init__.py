"""A recipe played in one process: simulated members, faults, traffic and plots."""
