"""Malformed updates: evidence that a signed row cannot be decoded."""
