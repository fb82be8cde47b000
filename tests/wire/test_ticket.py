"""Tickets: one line of text, refused for a reason that helps, redeemed without showing the secret."""

from __future__ import annotations

import base64
import os
import random

import msgspec
import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.base.errors import AtollError, RefusedError, UsageError
from atoll.base.ids import Digest, PeerId
from atoll.base.limits import TICKET_CHARACTERS_MAX
from atoll.crypto.identity import Identity
from atoll.wire.ticket import (
    REDEMPTION_BYTES,
    Ticket,
    TicketBody,
    issue,
    parse,
    redeemed_ticket,
    redemption_holds,
)

FUZZ = int(os.environ.get("ATOLL_FUZZ", "300"))
NOW_S = 1_790_000_000
GENESIS = Digest(b"g" * 32)
DIRECT = "/ip4/203.0.113.7/tcp/7071"
RELAY = "/dns4/relay.example.org/tcp/443/wss/p2p/12D3KooWH45PiqBjfnEfDfCD6TqJrpqTBJvQDwGHvjGpaWwms46D/p2p-circuit"
ISSUER = Identity.from_seeds(b"a" * 32, b"A" * 32)
JOINER = Identity.from_seeds(b"b" * 32, b"B" * 32).peer


def ticket(
    addresses: tuple[str, ...] = (DIRECT,),
    uses: int = 1,
    expires_wall_s: int = NOW_S + 3600,
    secret: bytes = b"s" * 32,
) -> Ticket:
    return issue(
        ISSUER,
        genesis=GENESIS,
        role="trainer",
        expires_wall_s=expires_wall_s,
        addresses=addresses,
        uses=uses,
        generate=lambda: Ed25519PrivateKey.from_private_bytes(secret),
    )


def bytes_of(text: str) -> bytes:
    letters = text.removeprefix("ATOLL1:")
    return base64.b32decode(letters + "=" * (-len(letters) % 8))


def text_of(data: bytes) -> str:
    """Length and checksum made right again, as somebody would who changes a ticket on purpose."""
    data = len(data).to_bytes(2, "big") + data[2:-4]
    return "ATOLL1:" + base64.b32encode(data + blake3(data).digest(length=4)).decode().rstrip("=")


def code_of(text: str, now_wall_s: float = NOW_S) -> str:
    """The code under which this text is refused; every refusal says likely cause and next command."""
    with pytest.raises(AtollError) as caught:
        parse(text).verify(now_wall_s)
    assert caught.value.cause and caught.value.fix
    assert len(text) < 20 or text[10:20] not in str(caught.value)  # nothing of it lands in a log
    return caught.value.code


# ---- good tickets ------------------------------------------------------------------------------------------


def test_a_ticket_survives_being_copied():
    """Lower case, line breaks and spaces as mail programs and terminals add them: the same ticket comes out."""
    original = ticket()
    text = original.text
    for copied in (
        text,
        text.lower(),
        f"  {text}\n",
        "\n".join(text[at : at + 40] for at in range(0, len(text), 40)),
    ):
        again = parse(copied)
        again.verify(NOW_S)
        assert again == original and again.text == text
    assert (again.genesis, again.issuer, again.role) == (GENESIS, ISSUER.peer, "trainer")
    assert (again.uses, again.expires_wall_s, again.addresses) == (1, NOW_S + 3600, (DIRECT,))


def test_a_ticket_fits_a_qr_code_with_a_direct_address_and_a_relay():
    """QR's compact alphanumeric mode has digits, capitals and the colon: nothing else is in a ticket."""
    text = ticket(addresses=(DIRECT, RELAY)).text
    assert (len(ticket().text), len(text)) == (350, 519)
    assert len(text) <= TICKET_CHARACTERS_MAX
    assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789:")


def test_the_bytes_of_a_ticket_are_frozen():
    """Golden: whoever changes this makes it ATOLL2."""
    assert blake3(ticket().text.encode()).hexdigest()[:32] == "fef775d618448f920642bef0a9efa2de"


def test_a_ticket_that_would_not_fit_is_not_issued():
    for settings_ in ({"addresses": (RELAY,) * 4}, {"uses": 0}, {"uses": 10**6}, {"addresses": ("/ip4",) * 9}):
        with pytest.raises(UsageError, match="E-TKT-08"):
            ticket(**settings_)


def test_a_ticket_shows_nothing_secret():
    assert "ssss" not in repr(ticket()) and "7373" not in repr(ticket())


# ---- wrong tickets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "hello", "https://example.org/x", "ATOLL", "ATOLL1", "TOLL1:ABC", "ATOLLX:ABC", "ATOLL²:AB"]
)
def test_what_is_no_ticket_is_called_so(text: str):
    assert code_of(text) == "E-TKT-01"


def test_a_ticket_cut_short_is_called_so_wherever_it_was_cut():
    """Every prefix of a ticket, letter by letter: the person is told that the end is missing."""
    text = ticket().text
    for length in range(len("ATOLL1:"), len(text)):
        assert code_of(text[:length]) == "E-TKT-02", length


def test_a_mistyped_letter_is_called_so():
    """Each letter behind the length, replaced by its neighbour, by one never used, or doubled."""
    text = ticket().text
    begin = len("ATOLL1:") + 4  # 3.2 letters say the length: changing them looks like a cut, see below
    for at in range(begin, len(text)):
        neighbour = "A" if text[at] != "A" else "B"
        for letters in (neighbour, "1", "é"):
            assert code_of(text[:at] + letters + text[at + 1 :]) == "E-TKT-03", at
    assert {code_of(text + "A" * more) for more in range(1, 9)} == {"E-TKT-03"}
    for at in range(len("ATOLL1:"), begin):
        assert code_of(text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :]) in ("E-TKT-02", "E-TKT-03")


def test_a_ticket_changed_on_purpose_is_called_so():
    """Any byte of content or signature changed, checksum made right: refused as forged, not as a slip."""
    data = bytes_of(ticket().text)
    for at in range(2, len(data) - 4):
        changed = bytearray(data)
        changed[at] ^= 1
        assert code_of(text_of(bytes(changed))) == "E-TKT-04", at


def test_a_ticket_signed_by_somebody_else_is_refused():
    """Mallory puts in her own addresses and signs herself, but leaves the issuer's name."""
    mallory = Identity.from_seeds(b"m" * 32, b"M" * 32)
    body = TicketBody(GENESIS, ISSUER.public.ed25519, "validator", 1, NOW_S + 1, b"s" * 32, ("/ip4/6.6.6.6/tcp/1",))
    encoded = msgspec.msgpack.encode(body)
    forged = Ticket(body, mallory.sign_classical(b"atoll/ticket/1\0" + encoded))
    with pytest.raises(RefusedError, match="E-TKT-04"):
        parse(forged.text).verify(NOW_S)


def test_an_expired_ticket_says_for_how_long():
    old = ticket(expires_wall_s=NOW_S - 7200)
    with pytest.raises(RefusedError, match=r"E-TKT-05 this ticket expired 2 h ago[\s\S]*atoll invite"):
        old.verify(NOW_S)
    old.verify(NOW_S - 7200)


def test_a_ticket_of_another_version_says_what_to_update():
    assert code_of(ticket().text.replace("ATOLL1", "ATOLL2")) == "E-TKT-06"
    assert code_of("ATOLL17:" + "7" * 700) == "E-TKT-06"


def test_too_much_text_is_refused_unread():
    assert code_of("ATOLL1:" + "A" * 700) == "E-TKT-07"
    assert code_of("ATOLL1:" + "A" * 10**7) == "E-TKT-07"


def test_a_ticket_has_one_text():
    """The unused bits of the last letter must be zero, or two texts would be one ticket."""
    for count in range(5):
        text = ticket(addresses=("/" * count,)).text
        alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
        for other in set(alphabet) - {text[-1]}:
            assert code_of(text[:-1] + other) == "E-TKT-03"


@pytest.mark.timeout(3600)  # with ATOLL_FUZZ=100000
@settings(max_examples=FUZZ, database=None)
@given(
    st.one_of(
        st.text(max_size=700), st.binary(max_size=300).map(text_of), st.text(max_size=80).map("ATOLL1:".__add__)
    )
)
def test_any_text_is_a_ticket_or_a_documented_error(text: str):
    try:
        parse(text).verify(NOW_S)
    except (UsageError, RefusedError) as error:
        assert error.code.startswith("E-TKT-0")
    else:
        raise AssertionError("nobody signed this")


@pytest.mark.timeout(3600)  # with ATOLL_FUZZ=100000
def test_any_change_to_a_ticket_is_noticed():
    """Random cuts, insertions and replacements of a true ticket; white space and case alone change nothing."""
    draw, text = random.Random(6), ticket().text
    for _ in range(FUZZ):
        at, end = sorted((draw.randrange(len(text) + 1), draw.randrange(len(text) + 1)))
        piece = "".join(draw.choices("ABCXYZ234567:01 é", k=draw.randrange(6)))
        changed = text[:at] + piece + text[at if draw.random() < 0.5 else end :]
        if "".join(changed.split()) != text:
            assert code_of(changed).startswith("E-TKT-0")


# ---- redeeming ---------------------------------------------------------------------------------------------


def test_a_redemption_proves_the_ticket_to_every_member():
    """80 bytes that name the ticket and hold against its public key, which is all that members know."""
    mine = ticket()
    redemption = parse(mine.text).redeem(JOINER)
    assert len(redemption) == REDEMPTION_BYTES == 80
    assert redeemed_ticket(redemption) == mine.id
    assert redemption_holds(redemption, mine.key, GENESIS, JOINER)


def test_a_redemption_is_good_for_one_joiner_one_ticket_one_run():
    """Whoever overhears it cannot use it, and it does not contain the secret."""
    mine, other = ticket(), ticket(secret=b"t" * 32)
    redemption = mine.redeem(JOINER)
    assert b"s" * 32 not in redemption
    assert not redemption_holds(redemption, mine.key, GENESIS, ISSUER.peer)
    assert not redemption_holds(redemption, mine.key, Digest(bytes(32)), JOINER)
    assert not redemption_holds(redemption, other.key, GENESIS, JOINER)
    assert not redemption_holds(other.id + redemption[16:], other.key, GENESIS, JOINER)


def test_strangers_redemptions_are_false_and_never_an_exception():
    draw, mine = random.Random(7), ticket()
    genuine = mine.redeem(JOINER)
    for _ in range(FUZZ):
        data = bytearray(genuine)
        data[draw.randrange(80)] ^= 1 << draw.randrange(8)
        assert not redemption_holds(bytes(data), mine.key, GENESIS, JOINER)
        assert not redemption_holds(draw.randbytes(draw.randrange(200)), mine.key, GENESIS, PeerId(""))
        assert not redemption_holds(genuine, draw.randbytes(draw.randrange(40)), GENESIS, JOINER)
