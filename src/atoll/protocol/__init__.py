"""Protocols between peers, each a sans-IO machine: events in, effects out."""
