"""Verbs that help before and beside a run: quickstart, check, explain, version."""
