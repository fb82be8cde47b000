"""What members exchange in a round: layouts, updates, combined parts and the shared state."""
