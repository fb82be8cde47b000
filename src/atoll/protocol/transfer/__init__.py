"""Blobs in verified chunks, from several peers at once."""
