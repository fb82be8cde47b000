"""Compiled codec kernels for CPUs and CUDA devices, and the choice between them and numpy."""
