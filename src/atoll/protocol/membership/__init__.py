"""Failure detection and clock synchronization among members."""
