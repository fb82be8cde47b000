"""Redundant training: two members train on the same samples, and their updates are compared."""
