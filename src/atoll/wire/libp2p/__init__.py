"""libp2p as sans-IO machines on bytes: negotiation, security, streams. Follows libp2p/specs and js-libp2p."""
