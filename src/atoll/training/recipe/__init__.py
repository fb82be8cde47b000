"""Recipes and their pieces: inner and outer optimizers, schedules, reducers and merges."""
