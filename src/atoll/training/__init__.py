"""Tensors: models, data, the six pieces of the training loop. The only pure floor that may import torch."""
