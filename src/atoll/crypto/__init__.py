"""Cryptography: identities, handshakes, encryption, digests, as pure functions on bytes, sans-IO."""
