"""Redundant training by twins: secret draws of guest and host, and verdicts from referees' reports.

    commitment of round r - 1   digest of a secret, fixed before the head that round r begins with exists
    round r                     the secret and that head draw whether a member is a guest, and its host
    commitment of round r + 1   the secret; the vertex that holds it reveals the twins of round r

A guest learns from its host's samples. Two rows with one root are alike and settled. If they differ, drawn referees
report how far each is from the update that these samples make. A member strayed if more than half of the referees
find its row too far; its next record shows it. A member that shows no row pays for it as for any other silence.

Invariants:
- Every peer that holds the same vertices gets the same draws and verdicts.
- No member can choose its host.
- Half of the referees change nothing, even if all others are silent.
- Memory is bounded by the window.
- A guest is revealed only after both twins have committed.
- A difference alone accuses neither twin, and no verdict expels.
Not responsible for: cases that twins cannot detect (specs/twins.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from atoll.base.draw import draw_below
from atoll.base.ids import DIGEST_BYTES, Digest, PeerId
from atoll.crypto.digest import digest
from atoll.policy.reputation import audit_factor, scores_of
from atoll.verification.case import CHANCES
from atoll.verification.review_ledger import DrawnUpdateReview, Numbers, ReviewLedger, ReviewVerdict, judges_of
from atoll.wire.codec import statement_in
from atoll.wire.messages.statements import Commitment, SealedDraw
from atoll.wire.messages.vertex import VertexBody

MILLION = 1_000_000
# share of an update's length: honest ones in other arithmetic are nearer (bench/twins.py)
TOLERANCE = MILLION // 10
APART_MOST = 1000 * MILLION  # distance of an update that was not shown; a shown one is nearer, however far it is

Opinion = Literal["alike", "strayed", "hidden", "unclear"]  # unclear: half of the referees or more sent no report


def seal_of(secret: bytes) -> Digest:
    """Digest of a secret, which fixes it before it is revealed."""
    return digest(b"atoll/twins/seal/1\0" + secret)


def host_of(guest: PeerId, secret: bytes, head: Digest, body: VertexBody, share: float) -> PeerId | None:
    """Host of this member in the round after this head; None: it takes its own samples.

    Members on probation are hosts four times as often, regular members twice, as with audits.
    """
    drawn = digest(b"atoll/twins/draw/1\0" + secret + head)
    if draw_below(drawn, "guest?", CHANCES) >= share * CHANCES:
        return None
    scores = scores_of(body)
    hosts = [m.peer for m in body.members if m.may_train and m.standing == "member" and m.peer != guest]
    lots = [peer for peer in hosts for _ in range(audit_factor(scores, peer))]
    return lots[draw_below(drawn, "host", len(lots))] if lots else None


def seals_in(body: VertexBody) -> dict[PeerId, Digest]:
    """Digests that bind each counted member for the round after this one."""
    return {p: commit.draws.sealed for p, commit in _commits(body).items() if commit.draws is not None}


def owed_by(body: VertexBody, before: VertexBody) -> dict[PeerId, Digest]:
    """Members that must reveal a secret in the commitment after `body`, and its digest.

    These are members that could take part in the draw of that round and count in it.
    """
    counted, seals = _commits(body), seals_in(before)
    return {peer: seal for peer, seal in seals.items() if peer in counted}


def _commits(body: VertexBody) -> dict[PeerId, Commitment]:
    said = ((signed.signer, statement_in(signed)) for signed in body.commits)
    return {peer: commit for peer, commit in said if isinstance(commit, Commitment)}


class RedundancyCase(DrawnUpdateReview):
    """Two different updates of one round, of guest and host, that should come from the same samples.

    Both secrets draw the referees. A report holds the distance of each update, in millionths.
    """

    @property
    def guest(self) -> PeerId:
        return self.authors[0]

    @property
    def host(self) -> PeerId:
        return self.authors[1]

    @property
    def strayed(self) -> tuple[PeerId, ...]:
        """Twins that more than half of all drawn referees find too far off; silent referees count as well."""
        return self._with_distance(lambda apart: TOLERANCE < apart < APART_MOST)

    @property
    def hid(self) -> tuple[PeerId, ...]:
        """Twins that showed their update to too few referees to be found near."""
        far = self._with_distance(lambda apart: apart > TOLERANCE)
        return tuple(peer for peer in far if peer not in self.strayed)

    def _with_distance(self, holds: Callable[[int], bool]) -> tuple[PeerId, ...]:
        """Authors of whose distance most referees say this."""
        return tuple(
            peer
            for place, peer in enumerate(self.authors)
            if self.most_say(lambda numbers, place=place: holds(numbers[place]))
        )

    @property
    def opinion(self) -> Opinion:
        if self.strayed or self.hid:
            return "strayed" if self.strayed else "hidden"
        return "alike" if 2 * len(self.said) > len(self.judges) else "unclear"


class RedundancyLedger(ReviewLedger[RedundancyCase]):
    """The twins of recent rounds."""

    check, duty, case_type = "twins", "compare twins", RedundancyCase
    what, unit = "twins that are being compared", "distances"
    is_about_member = False  # a case is about two members
    # secrets that the next commitments reveal; None: not known here
    owed: Mapping[PeerId, Digest] | None = None

    def are_valid(self, numbers: Numbers) -> bool:
        return len(numbers) == 2 and all(0 <= apart <= APART_MOST for apart in numbers)

    def verdict(self, case: RedundancyCase) -> ReviewVerdict:
        return ReviewVerdict(case.round, case.authors, case.opinion, case.strayed, case.hid)

    def open_cases(self, round: int, ids: Mapping[int, Digest], bodies: Mapping[int, VertexBody]) -> None:
        whole = round in bodies and round - 1 in bodies and self.lost < round - 1
        self.owed = owed_by(bodies[round], bodies[round - 1]) if whole else None
        if round in bodies:
            self._reveal(round, ids, bodies)

    def _reveal(self, round: int, ids: Mapping[int, Digest], bodies: Mapping[int, VertexBody]) -> None:
        """Open the twins of the round before, from the secrets in this vertex.

        A member that reveals nothing is not anyone's twin: a host that was itself a guest took other samples. Both
        secrets draw the referees: each was fixed while only its author knew it,
        and the proposer cannot choose them.
        """
        body, before = bodies[round], bodies.get(round - 1)
        head_body, head = bodies.get(round - 2), ids.get(round - 2)
        if before is None or head_body is None or head is None or self.lost >= round - 2:
            return
        secrets = {p: c.draws.revealed for p, c in _commits(body).items() if c.draws and c.draws.revealed}
        hosts = {p: host_of(p, secret, head, head_body, self.share) for p, secret in secrets.items()}
        made = _commits(before)
        for guest, host in sorted(hosts.items()):
            if host is None or host not in hosts or hosts[host] is not None or not {guest, host} <= made.keys():
                continue
            mine, its = made[guest], made[host]
            if mine.root == its.root:
                self.settled += (ReviewVerdict(before.round, (guest, host), "alike"),)
                continue
            drawn = digest(b"atoll/twins/referees/1\0" + secrets[guest] + secrets[host])
            if referees := judges_of((guest, host), drawn, "referees", before, self.rule):
                case = RedundancyCase(before.round, (guest, host), (mine, its), referees, drawn)
                self.cases[case.key] = case

    def sample_draw(self, head: Digest, body: VertexBody) -> RedundancyDraw:
        return RedundancyDraw(self.share, head, body, self.owed if body.round == self.head else None)

    def lose(self, round: int) -> None:
        super().lose(round)
        self.owed = None


@dataclass(frozen=True)
class RedundancyDraw:
    """Inputs of a round's twins; each member draws its own host from them."""

    share: float
    head: Digest
    body: VertexBody  # of that head
    owed: Mapping[PeerId, Digest] | None
    """Digest of the secret that each commitment of this round must reveal. None: vertices are missing, and revealed
        secrets are accepted unchecked.
    """

    def flaw(self, peer: PeerId, commit: Commitment) -> str | None:
        """Flaw in the secrets of a peer's commitment; None if there is none."""
        draws = commit.draws
        if draws is None or len(draws.sealed) != DIGEST_BYTES:
            return "does not say by which secret it takes samples"
        if self.owed is None:
            return None if len(draws.revealed) in (0, DIGEST_BYTES) else "reveals what is no secret"
        owed = self.owed.get(peer)
        if owed is None:
            return "reveals a secret that drew no samples" if draws.revealed else None
        fits = len(draws.revealed) == DIGEST_BYTES and seal_of(draws.revealed) == owed
        return None if fits else "reveals another secret than it drew by"

    def seal(self, peer: PeerId, round: int, secret: Callable[[int], bytes]) -> SealedDraw:
        """The secret that drew the samples before this round, and a digest of the one that draws them after it."""
        owes = self.owed is not None and peer in self.owed
        return SealedDraw(secret(round - 1) if owes else b"", seal_of(secret(round + 1)))

    def host(self, guest: PeerId, secret: bytes) -> PeerId | None:
        """Host of this member; None: it takes its own samples, as without a seal in the head."""
        sealed = seals_in(self.body).get(guest)
        return host_of(guest, secret, self.head, self.body, self.share) if sealed == seal_of(secret) else None
