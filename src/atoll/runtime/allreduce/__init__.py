"""The all-reduce alone: a group of processes that reduce tensors without a training run."""
