"""Decentralised all-reduce: plans as data, one machine that executes them."""
