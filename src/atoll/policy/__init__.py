"""Judgement: who computes what and until when, as pure functions of what was agreed. Never measures anything."""
