"""The worker of one peer: executes its tasks on tensors and drives the trainer process."""
