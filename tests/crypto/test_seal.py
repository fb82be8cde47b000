"""Boxes on one connection: what was changed, replayed or reordered ends it; keys turn over in lock-step."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from atoll.base.errors import PeerFault
from atoll.base.limits import MIB
from atoll.crypto.seal import (
    NONCE_END,
    TAG_BYTES,
    AeadAlgorithm,
    ConnectionKeysExhausted,
    ReceivingCipher,
    SendingCipher,
)

KEY = bytes(range(32))
both = pytest.mark.parametrize("aead", list(AeadAlgorithm))


@both
def test_a_box_opens_once_at_the_other_end(aead: AeadAlgorithm):
    seal, opener = SendingCipher(KEY, aead), ReceivingCipher(KEY, aead)
    boxes = [seal.seal(b"tensor"), seal.seal(b""), seal.seal(b"tensor")]
    assert boxes[0] != boxes[2]
    assert [opener.open(box) for box in boxes] == [b"tensor", b"", b"tensor"]


def test_boxes_are_those_of_noise():
    """Nonces and rekey of the Noise specification, sections 4.2 and 12: ChaCha20 little endian, AES big."""
    chacha, aes = (
        SendingCipher(KEY, AeadAlgorithm.CHACHA20_POLY1305, first_nonce=258),
        SendingCipher(KEY, AeadAlgorithm.AES_256_GCM, first_nonce=258),
    )
    assert chacha.seal(b"x", b"h") == ChaCha20Poly1305(KEY).encrypt(bytes(4) + b"\2\1" + bytes(6), b"x", b"h")
    assert aes.seal(b"x", b"h") == AESGCM(KEY).encrypt(bytes(10) + b"\1\2", b"x", b"h")
    chacha.rekey()
    second_key = ChaCha20Poly1305(KEY).encrypt(bytes(4) + b"\xff" * 8, bytes(32), b"")[:32]
    assert chacha.seal(b"y") == ChaCha20Poly1305(second_key).encrypt(bytes(4) + b"\3\1" + bytes(6), b"y", b"")


@both
def test_a_tensor_is_sealed_and_opened_where_it_lies(aead: AeadAlgorithm):
    """1 MiB in the caller's own memory: encrypted in place, decrypted in place, no copy on the way."""
    tensor = random.Random(3).randbytes(MIB)
    memory = bytearray(tensor + bytes(TAG_BYTES))
    plain = memoryview(memory)[:MIB]
    assert SendingCipher(KEY, aead).seal_into(plain, memory, b"header") == len(memory)
    assert bytes(plain) != tensor
    assert ReceivingCipher(KEY, aead).open_into(memory, plain, b"header") == MIB
    assert bytes(plain) == tensor


@both
def test_a_changed_box_ends_the_connection(aead: AeadAlgorithm):
    """Every single bit of the box and its header, and every cut; after one such box even good ones stay shut."""
    first, second = (seal := SendingCipher(KEY, aead)).seal(b"abc", b"h"), seal.seal(b"def", b"h")
    wrong = [
        (bytes([*first[:at], first[at] ^ 1 << bit, *first[at + 1 :]]), b"h") for at in range(19) for bit in range(8)
    ]
    wrong += [(first[:length], b"h") for length in range(19)] + [(first + b"\0", b"h"), (first, b"i"), (first, b"")]
    for box, header in wrong:
        opener = ReceivingCipher(KEY, aead)
        for attempt in (box, first, second):
            with pytest.raises(PeerFault, match="unknown peer: a box"):
                opener.open(attempt, header)


@both
def test_replayed_dropped_and_reordered_boxes_end_the_connection(aead: AeadAlgorithm):
    boxes = [SendingCipher(KEY, aead, first_nonce=n).seal(b"same") for n in range(3)]
    for order in ([0, 0], [1], [0, 2], [0, 1, 1]):
        opener = ReceivingCipher(KEY, aead)
        for n in order[:-1]:
            opener.open(boxes[n])
        with pytest.raises(PeerFault):
            opener.open(boxes[order[-1]])


@both
def test_a_direction_cannot_be_turned_round(aead: AeadAlgorithm):
    """The two directions have different keys: a box sent back to its maker is refused."""
    with pytest.raises(PeerFault):
        ReceivingCipher(bytes(32), aead).open(SendingCipher(KEY, aead).seal(b"echo"))


@both
def test_forged_bytes_are_never_shown(aead: AeadAlgorithm):
    """OpenSSL leaves the unchecked plaintext in the buffer; after a fault our buffer holds zeros."""
    box = bytearray(SendingCipher(KEY, aead).seal(b"plausible gradient"))
    box[-1] ^= 1
    out = bytearray(len(box) - TAG_BYTES)
    with pytest.raises(PeerFault):
        ReceivingCipher(KEY, aead).open_into(box, out)
    assert out == bytes(len(out))


@both
def test_keys_turn_over_in_lock_step(aead: AeadAlgorithm):
    """A new key every 100 bytes or 4 boxes, whichever comes first: both ends agree without a word."""
    draw = random.Random(4)
    seal, opener = (kind(KEY, aead, rekey_bytes=100, boxes_per_key=4) for kind in (SendingCipher, ReceivingCipher))
    assert isinstance(seal, SendingCipher) and isinstance(opener, ReceivingCipher)
    for _ in range(200):
        plain = draw.randbytes(draw.choice((0, 1, 30, 250)))
        assert opener.open(seal.seal(plain)) == plain


@both
def test_a_turnover_changes_the_key(aead: AeadAlgorithm):
    """Three boxes fit one key; who stays with it opens those three, and not the fourth."""
    seal = SendingCipher(KEY, aead, rekey_bytes=1 << 40, boxes_per_key=3)
    boxes = [seal.seal(b"x") for _ in range(4)]
    stale = ReceivingCipher(KEY, aead)
    assert [stale.open(box) for box in boxes[:3]] == [b"x"] * 3
    with pytest.raises(PeerFault):
        stale.open(boxes[3])


@both
def test_a_key_without_turnover_is_spent_and_never_wraps(aead: AeadAlgorithm):
    """libp2p never changes keys: at the limit both ends stop, nobody is blamed, and a rekey would go on."""
    seal, opener = SendingCipher(KEY, aead, boxes_per_key=2), ReceivingCipher(KEY, aead, boxes_per_key=2)
    for _ in range(2):
        opener.open(seal.seal(b"x"))
    for spent in (lambda: seal.seal(b"x"), lambda: opener.open(bytes(TAG_BYTES)), lambda: seal.seal(b"x")):
        with pytest.raises(ConnectionKeysExhausted):
            spent()
    seal.rekey()
    opener.rekey()
    assert opener.open(seal.seal(b"x")) == b"x"


@both
def test_the_last_nonce_is_kept_for_rekeying(aead: AeadAlgorithm):
    """At 2^64 - 1 the counter ends for good, turnover or not."""
    seal = SendingCipher(KEY, aead, rekey_bytes=1, first_nonce=NONCE_END - 1)
    seal.seal(b"x")
    with pytest.raises(ConnectionKeysExhausted):
        seal.seal(b"x")


def test_no_two_boxes_share_key_and_nonce():
    """A thousand equal boxes of 16 zero bytes all differ, across three turnovers: no keystream comes twice."""
    seal = SendingCipher(KEY, rekey_bytes=1 << 40, boxes_per_key=300)
    boxes = sorted(seal.seal(bytes(16))[:16] for _ in range(1000))
    assert all(one != other for one, other in pairwise(boxes))
