"""Policies: pure functions of agreed facts that decide roles, deadlines and rules. They measure nothing."""
