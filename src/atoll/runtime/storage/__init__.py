"""Files of one peer: keys, kept values, blobs, states, private training state."""
