"""Catching up with the run: vertices, agreed states, and messages that arrive too early."""
