"""Who is here: heartbeats, suspicions, run time."""
