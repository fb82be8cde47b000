"""Decentralized all-reduce: plans as data, one engine, and strategies for weights, verification and unmasking."""
