"""Noise protocol without identities: suites as tables, and the state machine of one handshake.

`NoiseState` writes and reads the messages of a suite token by token. It holds the transcript and the chaining key,
and splits them into keys at the end. Payloads are opaque bytes; `noise` checks identities.
Invariants:
- Lengths are checked before any work.
- An invalid message raises ValueError or InvalidTag, after which the state is unusable.
- All randomness comes from `HandshakeRandomness`.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import msgspec
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from atoll.crypto.seal import TAG_BYTES

DH_BYTES: Final = 32
KEM_KEY_BYTES: Final = 1184
KEM_CIPHERTEXT_BYTES: Final = 1088


class HandshakeRole(Enum):
    """Initiator or responder. The byte is signed, so no payload can be reflected to its author."""

    INITIATOR = b"I"
    RESPONDER = b"R"

    @property
    def other(self) -> HandshakeRole:
        return HandshakeRole.RESPONDER if self is HandshakeRole.INITIATOR else HandshakeRole.INITIATOR


class NoiseHandshakePattern(msgspec.Struct, frozen=True):
    """Noise pattern as a table: the tokens of each message and the longest payload."""

    protocol: str  # protocol id in multistream-select
    name: bytes  # name hashed into the transcript: must be equal to the letter at both ends
    messages: tuple[tuple[str, ...], ...]
    payload_max: int  # bytes of the second and third payload; the first message has none


# libp2p/specs #727 still renames its drafts, so Atoll's protocol id and prologue have their own version.
HYBRID: Final = NoiseHandshakePattern(
    protocol="/atoll/noise-xxhfs/1",
    name=b"Noise_XXhfs_25519+MLKEM768_ChaChaPoly_SHA256",
    messages=(("e", "e1"), ("e", "ee", "ekem1", "s", "es"), ("s", "se")),
    payload_max=6144,  # 5.4 kB of keys and signatures, plus room for more suites
)
CLASSICAL: Final = NoiseHandshakePattern(
    protocol="/noise",
    name=b"Noise_XX_25519_ChaChaPoly_SHA256",
    messages=(("e",), ("e", "ee", "s", "es"), ("s", "se")),
    payload_max=4096,  # 100 bytes of identity; the rest is for extensions, which are skipped
)
RESUMPTION: Final = NoiseHandshakePattern(
    protocol="/atoll/resume/1",
    name=b"Noise_NNpsk0_25519_ChaChaPoly_SHA256",
    messages=(("psk", "e"), ("e", "ee")),
    payload_max=0,
)
PREFERENCE: Final = (HYBRID.protocol, CLASSICAL.protocol)  # best first


@dataclass(frozen=True)
class HandshakeRandomness:
    """Sources of randomness of one handshake. Only known-answer tests replace them."""

    static: Callable[[], X25519PrivateKey] = X25519PrivateKey.generate
    ephemeral: Callable[[], X25519PrivateKey] = X25519PrivateKey.generate
    kem: Callable[[], MLKEM768PrivateKey] = MLKEM768PrivateKey.generate
    encapsulate: Callable[[bytes], tuple[bytes, bytes]] = field(  # public key -> (shared secret, ciphertext)
        default=lambda public: MLKEM768PublicKey.from_public_bytes(public).encapsulate()
    )


_TOKEN_BYTES = {
    "e": DH_BYTES,
    "e1": KEM_KEY_BYTES,  # in the first message, without a key yet: in clear, without a tag
    "ekem1": KEM_CIPHERTEXT_BYTES + TAG_BYTES,
    "s": DH_BYTES + TAG_BYTES,
}


class NoiseState:
    """State machine of one handshake: tokens, transcript, chaining key."""

    def __init__(
        self,
        suite: NoiseHandshakePattern,
        prologue: bytes,
        role: HandshakeRole,
        draws: HandshakeRandomness,
        psk: bytes = b"",
    ) -> None:
        self.suite, self.turn = suite, 0
        self._initiator, self._draws, self._psk = role is HandshakeRole.INITIATOR, draws, psk
        self._symmetric = _SymmetricState(suite.name, prologue)
        self._private = {"s": draws.static()}
        self._public: dict[str, X25519PublicKey] = {}
        self._kem: MLKEM768PrivateKey | None = None
        self._kem_public = b""
        self.signed_hash = b""  # transcript before the last payload, which that payload signs
        self.remote_static = b""

    @property
    def handshake_hash(self) -> bytes:
        return self._symmetric.transcript

    @property
    def is_finished(self) -> bool:
        return self.turn == len(self.suite.messages)

    def next_bytes(self) -> tuple[int, int]:
        """Shortest and longest size of the next message, in bytes."""
        shortest = sum(_TOKEN_BYTES.get(token, 0) for token in self.suite.messages[self.turn])
        if self.turn == 0:
            shortest += TAG_BYTES if self._psk else 0
            return shortest, shortest
        return shortest + TAG_BYTES, shortest + TAG_BYTES + self.suite.payload_max

    def write(self, payload: Callable[[bytes, bytes], bytes]) -> bytes:
        """Write the next message. `payload(transcript hash, static key)` returns the payload that signs both."""
        message = b"".join(self._write_token(token) for token in self.suite.messages[self.turn])
        if self.turn:
            static = self._private["s"].public_key().public_bytes_raw()
            message += self._symmetric.encrypt(payload(self._symmetric.transcript, static))
        else:
            message += self._symmetric.encrypt(b"")  # no payload; a tag if a pre-shared key is mixed in
        self.turn += 1
        return message

    def read(self, message: bytes) -> bytes:
        """Read the next message and return its payload.

        Raises ValueError or InvalidTag if it is invalid, after which the state is unusable.
        """
        shortest, longest = self.next_bytes()
        if not shortest <= len(message) <= longest:
            raise ValueError(f"message {self.turn + 1} has {len(message)} bytes, allowed: {shortest} to {longest}")
        at = 0
        for token in self.suite.messages[self.turn]:
            end = at + _TOKEN_BYTES.get(token, 0)
            self._read_token(token, message[at:end])
            at = end
        self.signed_hash = self._symmetric.transcript
        self.turn += 1
        return self._symmetric.decrypt(message[at:])

    def split(self, label: bytes = b"") -> tuple[bytes, bytes]:
        """Derive two keys, the initiator's direction first. Each label gives unrelated keys; Noise uses none."""
        assert self.is_finished
        return self._symmetric.split(label)

    def _write_token(self, token: str) -> bytes:
        symmetric = self._symmetric
        match token:
            case "e":
                self._private["e"] = self._draws.ephemeral()
                public = self._private["e"].public_key().public_bytes_raw()
                self._mix_ephemeral(public)
                return public
            case "e1":
                self._kem = self._draws.kem()
                return symmetric.encrypt(self._kem.public_key().public_bytes_raw())
            case "ekem1":
                secret, ciphertext = self._draws.encapsulate(self._kem_public)
                encrypted = symmetric.encrypt(ciphertext)  # before MixKey: the other order breaks every vector
                symmetric.mix_key(secret)
                return encrypted
            case "s":
                return symmetric.encrypt(self._private["s"].public_key().public_bytes_raw())
            case "psk":
                symmetric.mix_key_and_hash(self._psk)
                return b""
            case _:
                self._mix_dh(token)
                return b""

    def _read_token(self, token: str, data: bytes) -> None:
        symmetric = self._symmetric
        match token:
            case "e":
                self._mix_ephemeral(data)
                self._public["e"] = X25519PublicKey.from_public_bytes(data)
            case "e1":
                self._kem_public = symmetric.decrypt(data)
            case "ekem1":
                assert self._kem is not None
                ciphertext = symmetric.decrypt(data)
                symmetric.mix_key(self._kem.decapsulate(ciphertext))
            case "s":
                self.remote_static = symmetric.decrypt(data)
                self._public["s"] = X25519PublicKey.from_public_bytes(self.remote_static)
            case "psk":
                symmetric.mix_key_and_hash(self._psk)
            case _:
                self._mix_dh(token)

    def _mix_ephemeral(self, public: bytes) -> None:
        """With a pre-shared key, the ephemeral key also makes the keys unique (Noise section 9.2)."""
        self._symmetric.mix_hash(public)
        if self._psk:
            self._symmetric.mix_key(public)

    def _mix_dh(self, token: str) -> None:
        """Mix a Diffie-Hellman result. `es` is the initiator's e with the responder's s."""
        local, remote = token if self._initiator else reversed(token)
        self._symmetric.mix_key(self._private[local].exchange(self._public[remote]))


class _SymmetricState:
    """Noise SymmetricState for SHA-256 and ChaCha20-Poly1305."""

    def __init__(self, name: bytes, prologue: bytes) -> None:
        self.transcript = name.ljust(32, b"\0") if len(name) <= 32 else hashlib.sha256(name).digest()
        self._chain = self.transcript
        self._cipher: ChaCha20Poly1305 | None = None
        self._nonce = 0
        self.mix_hash(prologue)

    def mix_hash(self, data: bytes) -> None:
        self.transcript = hashlib.sha256(self.transcript + data).digest()

    def mix_key(self, secret: bytes) -> None:
        self._chain, key = _hkdf(self._chain, secret)
        self._cipher, self._nonce = ChaCha20Poly1305(key), 0

    def mix_key_and_hash(self, secret: bytes) -> None:
        self._chain, mixed, key = _hkdf(self._chain, secret, 3)
        self.mix_hash(mixed)
        self._cipher, self._nonce = ChaCha20Poly1305(key), 0

    def encrypt(self, plain: bytes) -> bytes:
        box = plain
        if self._cipher is not None:
            box = self._cipher.encrypt(self._next_nonce(), plain, self.transcript)
        self.mix_hash(box)
        return box

    def decrypt(self, box: bytes) -> bytes:
        plain = box
        if self._cipher is not None:
            plain = self._cipher.decrypt(self._next_nonce(), box, self.transcript)
        self.mix_hash(box)
        return plain

    def split(self, label: bytes) -> tuple[bytes, bytes]:
        initiator, responder = _hkdf(self._chain, label)
        return initiator, responder

    def _next_nonce(self) -> bytes:
        self._nonce += 1
        return bytes(4) + (self._nonce - 1).to_bytes(8, "little")


def _hkdf(chain: bytes, secret: bytes, outputs: int = 2) -> list[bytes]:
    """HKDF as defined by Noise."""
    root, found = hmac.digest(chain, secret, "sha256"), [b""]
    for number in range(1, outputs + 1):
        found.append(hmac.digest(root, found[-1] + bytes((number,)), "sha256"))
    return found[1:]
