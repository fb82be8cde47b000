"""Network of the real world: TCP, secure channels, libp2p control connections, the bulk lane."""
