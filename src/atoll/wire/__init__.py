"""Everything that may cross the network: messages, their codec, signed envelopes, tickets, libp2p."""
