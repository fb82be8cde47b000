"""Tickets: one line of text that admits a peer to a run.

    ATOLL1:AD4Q…                                        base32, so that a QR code stays small and case is free
    length 2 | body | issuer's Ed25519 signature 64 | checksum 4

A ticket carries a one-time secret: a private key. Its public key is in the agreed membership from the time of issue
(`TicketInvite`). A redemption is a signature by that key over run, ticket and joiner. Every member can verify it,
it does not reveal the secret, and only the joiner can use it.

Invariants:
- A wrong ticket is refused with a code for its kind of error.
- A ticket has one text.
- An eavesdropper cannot use a redemption.
- The secret never appears in an error or a log.
Not responsible for: use counts and revocation, which members agree on.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Annotated, Final, Literal

import msgspec
from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from atoll.base.errors import RefusedError, UsageError
from atoll.base.ids import DIGEST_BYTES, Digest, PeerId, Seconds
from atoll.base.limits import ADDRESS_BYTES_MAX, ADDRESSES_MAX, PEERS_MAX, TICKET_CHARACTERS_MAX
from atoll.base.units import seconds_text
from atoll.crypto.identity import (
    ED25519_KEY_BYTES,
    ED25519_SIGNATURE_BYTES,
    SEED_BYTES,
    EdKey,
    Identity,
    canonical,
    peer_id_of,
)

PREFIX: Final = "ATOLL"
VERSION: Final = "1"
TICKET_ID_BYTES: Final = 16
REDEMPTION_BYTES: Final = TICKET_ID_BYTES + ED25519_SIGNATURE_BYTES

_LENGTH_BYTES = 2
_CHECK_BYTES = 4
_OUTSIDE_BODY = _LENGTH_BYTES + ED25519_SIGNATURE_BYTES + _CHECK_BYTES
_SIGNED_DOMAIN = b"atoll/ticket/1\0"
_REDEEM_DOMAIN = b"atoll/ticket-redeem/1\0"

Role = Literal["trainer", "observer", "validator"]  # only validators may come to vote, and only once agreed


class TicketBody(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Signed content of a ticket."""

    genesis: Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
    issuer: EdKey
    role: Role
    uses: Annotated[int, msgspec.Meta(ge=1, le=PEERS_MAX)]
    expires_wall_s: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    secret: Annotated[bytes, msgspec.Meta(min_length=SEED_BYTES, max_length=SEED_BYTES)]
    addresses: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=ADDRESS_BYTES_MAX)], ...],
        msgspec.Meta(max_length=ADDRESSES_MAX),
    ]


class Ticket:
    """An issued or parsed ticket. `verify` checks its signature and expiry."""

    def __init__(self, body: TicketBody, signature: bytes) -> None:
        self._body, self._signature = body, signature
        self._secret = Ed25519PrivateKey.from_private_bytes(body.secret)
        self.genesis = Digest(body.genesis)
        self.issuer: PeerId = peer_id_of(body.issuer)
        self.role: Role = body.role
        self.uses = body.uses
        self.expires_wall_s = body.expires_wall_s
        self.addresses = body.addresses
        self.key = self._secret.public_key().public_bytes_raw()  # the public key in the agreed membership
        self.id = ticket_id(self.key)

    @property
    def text(self) -> str:
        """The text that people copy; a bearer secret."""
        body = _ENCODER.encode(self._body)
        length = (len(body) + _OUTSIDE_BODY).to_bytes(_LENGTH_BYTES, "big")
        data = length + body + self._signature
        data += _checksum(data)
        return f"{PREFIX}{VERSION}:{base64.b32encode(data).decode().rstrip('=')}"

    def verify(self, now_wall_s: Seconds) -> None:
        """Raise RefusedError if the issuer did not sign this ticket, or it has expired."""
        signed = _SIGNED_DOMAIN + _ENCODER.encode(self._body)
        if not _holds(self._body.issuer, signed, self._signature):
            raise _altered_error()
        if now_wall_s > self.expires_wall_s:
            raise RefusedError(
                "E-TKT-05",
                f"this ticket expired {seconds_text(now_wall_s - self.expires_wall_s)} ago",
                cause="it was used too late, or the clock of this computer is wrong",
                fix="ask for a new one: atoll invite",
            )

    def redeem(self, joiner: PeerId) -> bytes:
        """Redemption: proof that `joiner` holds this ticket, valid for this joiner only."""
        return self.id + self._secret.sign(_redemption_bytes(self.genesis, self.id, joiner))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ticket) and (self._body, self._signature) == (other._body, other._signature)

    def __hash__(self) -> int:
        return hash(self._body)

    def __repr__(self) -> str:
        return f"Ticket({self.id.hex()[:8]}, {self.role}, by {self.issuer[-8:]})"


def issue(
    issuer: Identity,
    *,
    genesis: Digest,
    role: Role,
    expires_wall_s: int,
    addresses: tuple[str, ...],
    uses: int = 1,
    generate: Callable[[], Ed25519PrivateKey] = Ed25519PrivateKey.generate,
) -> Ticket:
    """Issue a new ticket. Raises UsageError if it would not fit a QR code that a phone can read."""
    body = TicketBody(
        genesis, issuer.public.ed25519, role, uses, expires_wall_s, generate().private_bytes_raw(), addresses
    )
    ticket = Ticket(body, issuer.sign_classical(_SIGNED_DOMAIN + _ENCODER.encode(body)))
    excess = len(ticket.text) - TICKET_CHARACTERS_MAX
    if excess > 0 or canonical(_ENCODER.encode(body), _BODY, TICKET_CHARACTERS_MAX) is None:
        raise UsageError(
            "E-TKT-08",
            f"a ticket with these settings does not fit {TICKET_CHARACTERS_MAX} characters ({uses} uses, "
            f"{len(addresses)} addresses)",
            cause="too many or too long addresses, or a number of uses outside 1…" + str(PEERS_MAX),
            fix="name the one or two addresses that other peers can reach: atoll invite --address …",
        )
    return ticket


def parse(text: str) -> Ticket:
    """Parse a ticket, ignoring white space and case. Raises UsageError or RefusedError with its own code."""
    if len(text) > 4 * TICKET_CHARACTERS_MAX:
        raise _length_error(len(text))
    compact = "".join(text.split()).upper()
    head, colon, letters = compact.partition(":")
    if not head.startswith(PREFIX) or not colon or not head[len(PREFIX) :].isascii():
        raise _format_error()
    if head != PREFIX + VERSION:
        if not head[len(PREFIX) :].isdigit():
            raise _format_error()
        raise UsageError(
            "E-TKT-06",
            f"this ticket has format {head[len(PREFIX) :][:6]}; this Atoll reads format {VERSION}",
            cause="it was made by a newer Atoll",
            fix="install a newer Atoll in the way that this one was installed",
        )
    if len(compact) > TICKET_CHARACTERS_MAX:
        raise _length_error(len(compact))
    ticket = _decode_ticket(_decode_letters(letters))
    if ticket.text != compact:  # base32 leaves a few bits of the last letter unused
        raise _typo_error("its last letter is wrong")
    return ticket


def redemption_holds(redemption: bytes, key: bytes, genesis: Digest, joiner: PeerId) -> bool:
    """Whether `joiner` may use the ticket with the public key `key`. Never raises on untrusted bytes."""
    ticket, signature = redemption[:TICKET_ID_BYTES], redemption[TICKET_ID_BYTES:]
    if len(redemption) != REDEMPTION_BYTES or len(key) != ED25519_KEY_BYTES or ticket != ticket_id(key):
        return False
    return _holds(key, _redemption_bytes(genesis, ticket, joiner), signature)


def redeemed_ticket(redemption: bytes) -> bytes:
    """The ticket id in a redemption, to find its key in the agreed membership."""
    return redemption[:TICKET_ID_BYTES]


def ticket_id(key: bytes) -> bytes:
    """Ticket id, derived from its public key so that two tickets cannot share an id."""
    return blake3(_SIGNED_DOMAIN + key).digest(length=TICKET_ID_BYTES)


_ENCODER = msgspec.msgpack.Encoder()
_BODY = msgspec.msgpack.Decoder(TicketBody)


def _decode_letters(letters: str) -> bytes:
    wrong = sorted(set(letters) - set("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"))
    if wrong:
        raise _typo_error(f"{wrong[0]!r} is not a letter of tickets")
    if len(letters) % 8 in (1, 3, 6):  # numbers that no bytes have
        expected = int.from_bytes(base64.b32decode(letters[:8])[:_LENGTH_BYTES], "big") if len(letters) > 8 else 0
        if 0 < expected * 8 < len(letters) * 5:
            raise _typo_error("letters were added to it")
        raise _truncated_error("its number of letters is impossible")
    return base64.b32decode(letters + "=" * (-len(letters) % 8))


def _decode_ticket(data: bytes) -> Ticket:
    """Check length, then checksum, then content, so that a lost end, a typo and a forgery have different codes."""
    if len(data) < _LENGTH_BYTES:
        raise _truncated_error("it has no content")
    expected = int.from_bytes(data[:_LENGTH_BYTES], "big")
    if len(data) <= _OUTSIDE_BODY or _checksum(data[:-_CHECK_BYTES]) != data[-_CHECK_BYTES:]:
        if len(data) < expected:
            of = f" of {expected}" if expected <= TICKET_CHARACTERS_MAX * 5 // 8 else ""  # 8 letters hold 5 bytes
            raise _truncated_error(f"{len(data)}{of} bytes")
        if len(data) > expected:
            raise _typo_error(f"{len(data)} bytes in place of {expected}: text was added to it")
        raise _typo_error("its checksum is wrong")
    signed = data[_LENGTH_BYTES:-_CHECK_BYTES]
    body = canonical(signed[:-ED25519_SIGNATURE_BYTES], _BODY, TICKET_CHARACTERS_MAX)
    if expected != len(data) or body is None:
        raise _altered_error()
    return Ticket(body, signed[-ED25519_SIGNATURE_BYTES:])


def _checksum(data: bytes) -> bytes:
    return blake3(data).digest(length=_CHECK_BYTES)


def _holds(key: bytes, data: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def _redemption_bytes(genesis: Digest, ticket: bytes, joiner: PeerId) -> bytes:
    return _REDEEM_DOMAIN + genesis + ticket + joiner.encode()


def _format_error() -> UsageError:
    return UsageError(
        "E-TKT-01",
        f"this is not a ticket; tickets begin with {PREFIX}{VERSION}:",
        cause="another text was pasted, or the beginning is missing",
        fix="copy it whole, as `atoll up`, `atoll invite` or your script printed it",
    )


def _truncated_error(how: str) -> UsageError:
    return UsageError(
        "E-TKT-02",
        f"this ticket is cut short: {how}",
        cause="the end was not copied",
        fix="copy it whole, as `atoll up`, `atoll invite` or your script printed it, or scan its QR code",
    )


def _typo_error(how: str) -> UsageError:
    return UsageError(
        "E-TKT-03",
        f"this ticket is mistyped: {how}",
        cause="a letter was mistyped or changed on the way",
        fix="copy and paste it, as `atoll up`, `atoll invite` or your script printed it, or scan its QR code",
    )


def _altered_error() -> RefusedError:
    return RefusedError(
        "E-TKT-04",
        "this ticket is not what its issuer signed",
        cause="it was changed on purpose: its checksum is right, but its signature or content is wrong",
        fix="do not use it; ask the issuer for a new one over another channel: atoll invite",
    )


def _length_error(characters: int) -> UsageError:
    return UsageError(
        "E-TKT-07",
        f"{characters} characters are too many for a ticket, limit {TICKET_CHARACTERS_MAX}",
        cause="more than the ticket was pasted",
        fix="copy the ticket alone, as `atoll up`, `atoll invite` or your script printed it",
    )
