"""Identities, their certificates, and the sessions they vouch for."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable

import msgspec
import pytest
from blake3 import blake3
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA65PrivateKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey

from atoll.base.errors import AtollError, UsageError
from atoll.crypto import identity as identity_module
from atoll.crypto.identity import (
    CERTIFICATE_BYTES_MAX,
    Identity,
    SessionCertificate,
    SessionGrant,
    SessionSigner,
    SessionVerifier,
    VotePrivateKey,
    ed25519_of,
    ed25519_of_libp2p,
    libp2p_public_key,
    open_session_certificate,
    peer_id_of,
    public_bytes,
)

RUN = b"r" * 32
encode = msgspec.msgpack.encode


def session_of(
    identity: Identity, generate: Callable[[], VotePrivateKey] = Ed25519PrivateKey.generate, **changes: int
) -> SessionSigner:
    terms = {"epoch": 0, "not_before_s": 1_000, "not_after_s": 2_000} | changes
    return SessionSigner.certified(identity, RUN, generate=generate, **terms)


VOTES = pytest.mark.parametrize(
    "generate", [Ed25519PrivateKey.generate, MLDSA65PrivateKey.generate], ids=["ed25519", "ml-dsa-65"]
)


# ---- peer ids ----------------------------------------------------------------------------------------------

# ChainSafe/js-libp2p-noise test/fixtures/peer.ts, commit 2af4c74
JS_PEERS = {
    "12D3KooWH45PiqBjfnEfDfCD6TqJrpqTBJvQDwGHvjGpaWwms46D": "CAESIGuE+IlrqZDHuaGBsBh9x8n73f0HIEk6oO9aGGSWnSeq",
    "12D3KooWP63uzL78BRMpkQ7augMdNi1h3VBrVWZucKjyhzGVaSi1": "CAESIMUslSn9+oqckRi+rMxsx7hbOXHhLrhlazzIP61tgodW",
    "12D3KooWF85R7CM2Wikdtb2sjwnd24e1tgojf3MEWwizmVB8PA6U": "CAESIE7T8n59pCdYJ97jmE3JqBxVNW2xEzbUVbjzItX5g5qh",
    "12D3KooWPCofiCjhdtezP4eMnqBjjutFZNHjV39F5LWNrCvaLnzT": "CAESIMbnikZaPciAMZhUXqDRVCs7VFOBtmlIk26g0GgOotDA",
}


@pytest.mark.parametrize(("peer", "key"), JS_PEERS.items())
def test_peer_ids_are_those_of_js_libp2p(peer: str, key: str):
    """Published public keys give the published ids, and the ids give the keys back."""
    message = base64.b64decode(key)
    ed25519 = ed25519_of_libp2p(message)
    assert peer_id_of(ed25519) == peer
    assert ed25519_of(peer) == ed25519
    assert libp2p_public_key(ed25519) == message


def test_a_peer_id_has_one_spelling(fuzz: int):
    """Random single-letter changes either name another key, spelled exactly so, or are refused."""
    draw = random.Random(1)
    peer = next(iter(JS_PEERS))
    for _ in range(fuzz):
        at, letter = draw.randrange(len(peer)), draw.choice("123ABCxyz0OIl é")
        changed = peer[:at] + letter + peer[at + 1 :]
        try:
            key = ed25519_of(changed)
        except ValueError:
            continue
        assert peer_id_of(key) == changed


@pytest.mark.parametrize("text", ["", "1", "12D3KooW", "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "z" * 52])
def test_what_is_no_ed25519_peer_id_is_refused(text: str):
    """The Qm… is the id of an RSA key, from libp2p's specification."""
    with pytest.raises(ValueError, match="peer id"):
        ed25519_of(text)


# ---- the identity itself -----------------------------------------------------------------------------------


def test_an_identity_survives_the_disk_as_88_bytes(alice: Identity):
    """Seeds only; the same peer comes back, and the bytes never change."""
    data = alice.to_bytes()
    again = Identity.from_bytes(data)
    assert (again.public, again.to_bytes(), len(data)) == (alice.public, data, 88)


def test_new_identities_differ():
    assert Identity.generate().peer != Identity.generate().peer


def test_an_identity_shows_nothing_secret(alice: Identity):
    """Nothing that is printed by accident, in a log or a traceback, contains a seed."""
    shown = repr(alice) + str(alice) + repr(session_of(alice))
    assert alice.peer in shown
    assert "aaaa" not in shown and "6161" not in shown


def test_every_damaged_identity_file_is_named_for_what_it_is(alice: Identity):
    """Cut anywhere, or with any byte changed, it is never loaded, and the message carries a code and a way out."""
    data = alice.to_bytes()
    codes = set[str]()
    for damaged in [data[:length] for length in range(len(data))] + [
        data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(len(data))
    ]:
        with pytest.raises(UsageError) as caught:
            Identity.from_bytes(damaged)
        codes.add(caught.value.code)
        assert caught.value.cause and caught.value.fix
    assert codes == {"E-KEY-01", "E-KEY-02", "E-KEY-03"}


@pytest.mark.parametrize("primitive", [MLDSA65PrivateKey, MLKEM768PrivateKey])
def test_without_post_quantum_cryptography_nothing_starts(primitive: type, monkeypatch: pytest.MonkeyPatch):
    """Where ML-DSA or ML-KEM is missing, making and loading an identity both fail: there is no weaker mode."""
    data = Identity.generate().to_bytes()

    def unsupported(*_: object) -> None:
        raise UnsupportedAlgorithm("not in this build")

    monkeypatch.setattr(primitive, "from_seed_bytes", unsupported)
    for start in (Identity.generate, lambda: Identity.from_bytes(data)):
        with pytest.raises(AtollError, match="E-KEY-04"):
            start()


# ---- certificates ------------------------------------------------------------------------------------------


def test_a_certificate_has_one_encoding(alice: Identity):
    """The same values in longer msgpack, or with bytes behind them, are refused though all signatures hold."""
    certificate = session_of(alice).certificate
    assert certificate[:1] == b"\x93" and open_session_certificate(certificate) is not None
    for other in (certificate + b"\0", b"\xdc\x00\x03" + certificate[1:]):
        assert open_session_certificate(other) is None


def test_a_signature_means_one_kind_of_thing(alice: Identity):
    """What both keys signed as a pair is no session, and a session's word is not valid without its domain."""
    pair = encode(alice.public)
    signature = alice.sign(b"atoll/identity/1\0" + pair)
    assert alice.public.holds(b"atoll/identity/1\0" + pair, signature)
    assert not alice.public.holds(b"atoll/session/1\0" + pair, signature)
    session = session_of(alice)
    bare = Ed25519PrivateKey.from_private_bytes(session.to_bytes()[:32]).sign(b"vote")
    assert SessionVerifier().holds(session.vote_key, b"vote", session.sign(b"vote"))
    assert not SessionVerifier().holds(session.vote_key, b"vote", bare)


def test_the_signed_bytes_of_a_session_are_frozen(alice: Identity):
    """Golden: whoever changes this must change the domain to …/2 and the page in specs/."""
    session = SessionGrant(alice.public, b"v" * 32, RUN, 7, 1_700_000_000, 1_800_000_000)
    assert blake3(encode(session)).hexdigest() == (
        "aac03edec0c19af64a9d5f51b7dc7d8eb4037531779248dcc964d0480900bc5a"
    )
    assert len(session_of(alice).certificate) == 5515


# ---- sessions ----------------------------------------------------------------------------------------------


@VOTES
def test_a_session_speaks_for_its_peer_in_its_run_only(
    alice: Identity, bob: Identity, generate: Callable[[], VotePrivateKey]
):
    verifier, session = SessionVerifier(), session_of(alice, generate)
    certificate, key = session.certificate, session.vote_key
    assert verifier.certifies(certificate, alice.peer, key, RUN)
    assert not verifier.certifies(certificate, bob.peer, key, RUN)
    assert not verifier.certifies(certificate, alice.peer, session_of(alice).vote_key, RUN)
    assert not verifier.certifies(certificate, alice.peer, key, b"another run")


def test_whether_a_session_is_current_is_asked_where_somebody_joins(alice: Identity):
    """`certifies` ignores clocks, so that peers whose clocks differ count votes alike."""
    session = session_of(alice, not_before_s=1_000, not_after_s=2_000)
    said = SessionVerifier().session_of(session.certificate)
    assert said is not None
    assert [said.valid_at(now) for now in (999, 1_000, 2_000, 2_001)] == [False, True, True, False]


def test_nobody_can_adopt_the_vote_key_of_another(alice: Identity, mallory: Identity):
    """Mallory has both her keys certify Alice's vote key; without Alice's own signature by it, it is nothing."""
    hers = msgspec.msgpack.decode(session_of(alice).certificate, type=SessionCertificate)
    key = session_of(alice).vote_key
    session = encode(SessionGrant(mallory.public, key, RUN, 0, 1_000, 2_000))
    signature = mallory.sign(b"atoll/session/1\0" + session)
    for possession in (hers.possession, mallory.sign_classical(b"atoll/session-possession/1\0" + session)):
        assert open_session_certificate(encode(SessionCertificate(session, possession, signature))) is None


def test_a_forger_of_ed25519_is_known_by_its_other_identity(alice: Identity):
    """Somebody who has Alice's Ed25519 key, but not her ML-DSA key, makes a certificate that holds by itself.

    The membership holds the digest of what `identity_of` says of hers (tests/policy/test_members.py).
    """
    forger = Identity.from_seeds(b"a" * 32, b"forged".ljust(32))
    session, hers, verifier = session_of(forger), session_of(alice), SessionVerifier()
    assert forger.peer == alice.peer
    assert verifier.certifies(session.certificate, alice.peer, session.vote_key, RUN)
    assert verifier.identity_of(hers.certificate) == public_bytes(alice.public)
    assert verifier.identity_of(session.certificate) == public_bytes(forger.public) != public_bytes(alice.public)


def test_a_vote_of_one_kind_is_not_one_of_the_other(alice: Identity):
    """The kind is told by the key's length alone, so no length in between is anybody's key."""
    verifier = SessionVerifier()
    short, long = session_of(alice), session_of(alice, MLDSA65PrivateKey.generate)
    assert (len(short.sign(b"x")), len(long.sign(b"x"))) == (64, 3309)
    for key in (short.vote_key, long.vote_key):
        for signature in (short.sign(b"x"), long.sign(b"x")):
            mine = (len(key) == 32) == (len(signature) == 64)
            assert verifier.holds(key, b"x", signature) == mine
            assert not verifier.holds(key[:-1], b"x", signature) and not verifier.holds(key, b"y", signature)


@VOTES
def test_a_restarted_peer_goes_on_with_the_same_vote_key(alice: Identity, generate: Callable[[], VotePrivateKey]):
    session = session_of(alice, generate)
    again = SessionSigner.from_bytes(session.to_bytes())
    assert (again.peer, again.vote_key, again.certificate) == (alice.peer, session.vote_key, session.certificate)
    assert SessionVerifier().holds(session.vote_key, b"x", again.sign(b"x"))


@VOTES
def test_a_stored_session_with_another_key_is_refused(alice: Identity, generate: Callable[[], VotePrivateKey]):
    session = session_of(alice, generate)
    for damaged in (b"", b"x" * 32 + session.certificate, session.to_bytes()[:-1]):
        with pytest.raises(UsageError, match="E-KEY-05"):
            SessionSigner.from_bytes(damaged)


def test_a_verifier_remembers_a_bounded_number_of_certificates(alice: Identity, monkeypatch: pytest.MonkeyPatch):
    """Three places, five certificates: the first is checked again, the last is not."""
    opened: list[bytes] = []

    def counting(certificate: bytes) -> SessionGrant | None:
        opened.append(certificate)
        return open_session_certificate(certificate)

    monkeypatch.setattr(SessionVerifier, "REMEMBERED_MAX", 3)
    monkeypatch.setattr(identity_module, "open_session_certificate", counting)
    verifier, certificates = SessionVerifier(), [session_of(alice).certificate for _ in range(5)]
    for certificate in [*certificates, certificates[4], certificates[0]]:
        assert verifier.session_of(certificate) is not None
    assert opened == [*certificates, certificates[0]]


@pytest.mark.timeout(3600)  # with ATOLL_FUZZ=100000
def test_strangers_bytes_are_false_and_never_an_exception(alice: Identity, fuzz: int):
    """Random bytes, and genuine certificates with bytes changed, cut or added."""
    draw, verifier, session = random.Random(2), SessionVerifier(), session_of(alice)
    genuine = session.certificate
    for _ in range(fuzz):
        data = bytearray(genuine if draw.random() < 0.8 else draw.randbytes(draw.randrange(300)))
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(data) + 1)
            data[at : at + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
        if bytes(data) == genuine:
            continue
        assert verifier.certifies(bytes(data), alice.peer, session.vote_key, RUN) is False
        assert verifier.holds(bytes(data[:40]), b"x", bytes(data[:70])) is False
    assert verifier.session_of(bytes(CERTIFICATE_BYTES_MAX + 1)) is None
