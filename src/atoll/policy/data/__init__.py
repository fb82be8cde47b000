"""Shared data set of user loops: agreed positions, and the claims of one member."""
