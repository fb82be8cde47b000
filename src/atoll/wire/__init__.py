"""Wire format: messages, their codec, signed envelopes, tickets, libp2p."""
