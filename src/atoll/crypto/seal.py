"""Authenticated encryption of a connection, one key per direction (Noise CipherState).

A `SendingCipher` seals boxes and a `ReceivingCipher` opens them. Each has a key and a counter that is the nonce.
Control connections use them as libp2p does. Bulk lanes set `rekey_bytes`: boxes of up to 1 MiB are written into the
caller's buffers, and both ends change keys in lock-step, since they count the same boxes.

Invariants:
- A changed, replayed, dropped or reordered box is a PeerFault and ends the connection.
- No nonce is used twice under one key. A counter never wraps: it ends the connection.
- Bytes that failed their check are wiped before they can be read.
Not responsible for: framing, buffering, copying. Large data is encrypted in place.
"""

from __future__ import annotations

from enum import Enum
from struct import Struct
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from atoll.base.errors import PeerFault

KEY_BYTES: Final = 32
TAG_BYTES: Final = 16
NONCE_END: Final = 2**64 - 1  # the last nonce, which Noise reserves for rekeying
BOXES_PER_KEY: Final = 2**32 - 1  # limit of the AES-GCM standard for one key, used for both ciphers
BULK_REKEY_BYTES: Final = 2**36  # 64 GiB: below 2^-64 of telling AES-GCM boxes from noise, and costs nothing

Buffer = bytes | bytearray | memoryview
Writable = bytearray | memoryview


class AeadAlgorithm(Enum):
    """Authenticated ciphers, best first. Their names are sent in the handshake."""

    AES_256_GCM = "AES-256-GCM"  # 2.7x as fast on processors with AES instructions
    CHACHA20_POLY1305 = "ChaCha20-Poly1305"  # fast on all processors; every peer has it


# Noise nonces: four zero bytes and the counter, in a byte order that depends on the cipher
NONCES: Final = {AeadAlgorithm.AES_256_GCM: Struct(">4xQ"), AeadAlgorithm.CHACHA20_POLY1305: Struct("<4xQ")}


class ConnectionKeysExhausted(Exception):
    """The keys of a connection are used up, which is no peer's fault: close it and open another."""


class _DirectionKey:
    """Key of one direction with its nonce counter, use limits and rekeying."""

    def __init__(
        self,
        key: bytes,
        aead: AeadAlgorithm = AeadAlgorithm.CHACHA20_POLY1305,
        *,
        rekey_bytes: int | None = None,
        boxes_per_key: int = BOXES_PER_KEY,
        first_nonce: int = 0,
    ) -> None:
        assert len(key) == KEY_BYTES
        self.aead = aead
        self._cipher, self._nonce_of = _cipher(key, aead), NONCES[aead].pack
        self._rekey_bytes, self._boxes_per_key = rekey_bytes, boxes_per_key
        self._nonce, self._boxes, self._plain_bytes = first_nonce, 0, 0

    def _next_nonce(self) -> bytes:
        """Return an unused nonce. It counts as used even if the caller fails."""
        if self._boxes >= self._boxes_per_key or self._nonce >= NONCE_END:
            raise ConnectionKeysExhausted(f"after {self._nonce} boxes this connection's key is used up: reconnect")
        nonce, self._nonce, self._boxes = self._nonce, self._nonce + 1, self._boxes + 1
        return self._nonce_of(nonce)

    def _count(self, plain_bytes: int) -> None:
        if self._rekey_bytes is None:
            return  # libp2p's Noise never changes keys: such a connection ends after BOXES_PER_KEY
        self._plain_bytes += plain_bytes
        if self._plain_bytes >= self._rekey_bytes or self._boxes >= self._boxes_per_key:
            self.rekey()

    def rekey(self) -> None:
        """Noise REKEY: the next key is zeros encrypted under the last nonce. The counter continues."""
        box = self._cipher.encrypt(self._nonce_of(NONCE_END), bytes(KEY_BYTES), b"")
        self._cipher = _cipher(box[:KEY_BYTES], self.aead)
        self._boxes, self._plain_bytes = 0, 0


class SendingCipher(_DirectionKey):
    """Key of the sending end of one direction."""

    def seal(self, plain: Buffer, header: bytes = b"") -> bytes:
        """Return the box for `plain`, TAG_BYTES longer. `header` is authenticated but not part of the box."""
        nonce = self._next_nonce()
        box = self._cipher.encrypt(nonce, plain, header)
        self._count(len(plain))
        return box

    def seal_into(self, plain: Buffer, out: Writable, header: bytes = b"") -> int:
        """Write the box to `out`, exactly TAG_BYTES longer than `plain`, and return its size in bytes.

        Both buffers may begin at the same address.
        """
        assert len(out) == len(plain) + TAG_BYTES
        nonce = self._next_nonce()
        box_bytes = self._cipher.encrypt_into(nonce, plain, header, out)
        self._count(len(plain))
        return box_bytes


class ReceivingCipher(_DirectionKey):
    """Key of the receiving end of one direction. After one invalid box it opens no more boxes."""

    _is_broken = False

    def open(self, box: Buffer, header: bytes = b"") -> bytes:
        nonce = self._nonce_for(box)
        try:
            plain = self._cipher.decrypt(nonce, box, header)
        except InvalidTag:
            raise self._fault() from None
        self._count(len(plain))
        return plain

    def open_into(self, box: Buffer, out: Writable, header: bytes = b"") -> int:
        """Write the content to `out`, exactly TAG_BYTES shorter than `box`, and return its size in bytes.

        Both buffers may begin at the same address. Raises PeerFault for an invalid box.
        """
        nonce = self._nonce_for(box)
        assert len(out) == len(box) - TAG_BYTES
        try:
            plain_bytes = self._cipher.decrypt_into(nonce, box, header, out)
        except InvalidTag:
            out[:] = bytes(len(out))  # OpenSSL decrypts before it checks: `out` now holds forged bytes
            raise self._fault() from None
        self._count(plain_bytes)
        return plain_bytes

    def _nonce_for(self, box: Buffer) -> bytes:
        if self._is_broken or len(box) < TAG_BYTES:
            raise self._fault()
        return self._next_nonce()

    def _fault(self) -> PeerFault:
        self._is_broken = True
        # without a peer: an attacker on the path can do this to an honest peer
        return PeerFault("", "a box that this connection's key does not open")


def _cipher(key: bytes, aead: AeadAlgorithm) -> AESGCM | ChaCha20Poly1305:
    match aead:
        case AeadAlgorithm.AES_256_GCM:
            return AESGCM(key)
        case AeadAlgorithm.CHACHA20_POLY1305:
            return ChaCha20Poly1305(key)
