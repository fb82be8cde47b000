"""Shared data set of user loops: sources, shards, and the iterator that a loop reads."""
