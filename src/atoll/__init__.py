"""Atoll trains one PyTorch model on many machines that nobody fully controls."""

__version__ = "0.1.0"
