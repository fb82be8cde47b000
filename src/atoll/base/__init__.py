"""Shared basics: events and effects, ids, units, limits, errors, seeded draws."""
