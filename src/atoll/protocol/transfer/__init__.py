"""Blob transfer in verified chunks, from several peers at once."""
