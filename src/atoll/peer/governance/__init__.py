"""Operator orders that a run agrees on: pause, changed settings, rollback."""
