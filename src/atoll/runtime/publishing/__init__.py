"""Published checkpoints: agreed states in a folder, an object store or on the Hugging Face hub."""
