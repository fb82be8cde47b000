"""Offline verification of a run's history."""
