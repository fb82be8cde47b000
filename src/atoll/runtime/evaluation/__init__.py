"""Evaluation of agreed states while a run trains, in a process of its own."""
