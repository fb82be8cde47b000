"""libp2p as pure machines on bytes: negotiation, security, streams. Held to libp2p/specs and to js-libp2p."""
