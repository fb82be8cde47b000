"""The words everyone shares: events and effects, names, units, limits, errors, seeded draws."""
