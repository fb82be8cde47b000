"""Sum check draws: blocks of each part that its owner must open, and their checkers, from the closing vertex.

Owners are spot-checked where no witness combines the same part, or where all witnesses may lie. A small share of
blocks of every result in a vertex is drawn and dealt to f + 1 checkers, so one of them is honest even if a liar
influenced the draw. A checker that finds no fault sends no report. If a checker is shown a lie, or nothing, it
signs a report. Then every other checker in the order requests the same blocks. A finding counts if more checkers
than may lie report it.

Invariants:
- Every peer that holds the vertex gets the same draws.
- No report is sent without a doubt.
Not responsible for: requesting or judging openings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeAlias

from atoll.base.draw import draw_below, shuffled
from atoll.base.ids import DIGEST_BYTES, Digest, PeerId
from atoll.base.limits import AUDIT_TURN, LEAF_BYTES_MAX, OPENED_BLOCKS_MAX, PATH_MAX
from atoll.policy.capability_terms import SumCheckTerms
from atoll.policy.findings import AGAINST, voices_needed
from atoll.policy.plan import QuorumRule
from atoll.policy.signing import MLDSA65
from atoll.verification.case import CHANCES, NOTHING, SpotCheck
from atoll.wire.codec import decode_statement
from atoll.wire.messages.statements import Finding, OwnerResult, SignedStatement
from atoll.wire.messages.vertex import VertexBody

Place: TypeAlias = tuple[int, int]  # round and part


@dataclass
class SumSpotCheck(SpotCheck):
    """Blocks of one part drawn for one checker, and the reports on them."""

    round: int
    peer: PeerId  # owner of the result
    number: int  # number among the openings of this round
    answered: OwnerResult
    blocks: tuple[int, ...]
    order: tuple[PeerId, ...]  # first the checker they were drawn for, then the ones that are asked if it doubts
    needed: int
    said: dict[PeerId, tuple[int, Finding]] = field(default_factory=dict[PeerId, tuple[int, Finding]])
    judged: dict[PeerId, Digest] = field(default_factory=dict[PeerId, Digest])

    @property
    def key(self) -> tuple[int, PeerId, int]:
        return self.round, self.peer, self.number

    @property
    def place(self) -> Place:
        return self.round, self.answered.part

    @property
    def bytes_most(self) -> int:
        """Most bytes of an opening: leaves are never longer than in fp32; paths and commitments have their
        bounds."""
        rows = len(self.answered.contributors)
        leaf = LEAF_BYTES_MAX + PATH_MAX * (DIGEST_BYTES + 2)
        return len(self.blocks) * (rows + 1) * leaf + rows * (MLDSA65.commit_bytes_max + leaf)

    def asked(self, head: int, ahead: Mapping[PeerId, Finding] = NOTHING) -> tuple[PeerId, ...]:
        if not self.said and not ahead:  # true of nearly all, and every vertex asks for hundreds
            return self._first(head)
        said = self.with_words(head, ahead)
        findings = [finding for _, finding in said.values()]
        against, agreeing = sum(f in AGAINST for f in findings), findings.count("accepted")
        if not against:
            return self._first(head)
        if against >= self.needed or agreeing > against:
            return ()
        return tuple(peer for peer in self.order if peer not in said)

    def _first(self, head: int) -> tuple[PeerId, ...]:
        return self.order[:1] if head - self.round < AUDIT_TURN else ()


def words_against(
    openings: Iterable[SumSpotCheck], seconded: Mapping[Place, Sequence[SignedStatement]], findings: Set[Finding]
) -> dict[tuple[int, PeerId], SignedStatement]:
    """Signers of these results, and rounds, with a finding from enough checkers.

    Counted by round, as for owners: of more checkers than may lie one is honest, and its finding is about a result
    that this peer signed. One report from each is enough.
    """
    words: dict[tuple[int, PeerId], SignedStatement] = {}
    voices: dict[tuple[int, PeerId], set[PeerId]] = {}
    enough: dict[tuple[int, PeerId], SignedStatement] = {}
    for opening in openings:
        against = {by for by, (_, finding) in opening.said.items() if finding in findings}
        for word in seconded.get(opening.place, ()) if against else ():
            whose = opening.round, word.signer
            words.setdefault(whose, word)
            voices.setdefault(whose, set()).update(against)
            if len(voices[whose]) >= opening.needed:
                enough[whose] = words[whose]
    return enough


def openings_of(vertex: Digest, body: VertexBody, terms: SumCheckTerms, rule: QuorumRule) -> Iterator[SumSpotCheck]:
    """All openings that this vertex draws. Its id is unknown until every result in it is signed and durable."""
    voters = sum(m.votes for m in body.members)
    able = [m.peer for m in body.members if m.votes and m.standing == "member"]
    needed, slots = voices_needed(voters, rule), ((voters - 1) // 3 + 1 if rule == "two-thirds" else 1)
    for part, signed in enumerate(body.parts):
        answered = decode_statement(signed.body, signed.signer) if signed is not None else None
        if signed is None or not isinstance(answered, OwnerResult):
            continue
        checkers = [p for p in shuffled(vertex, f"checkers of part {part}", able) if p != signed.signer]
        drawn = drawn_blocks(vertex, part, -(-answered.size_bytes // terms.leaf_bytes), terms.share)
        for slot in range(min(slots, len(checkers), len(drawn))):
            order = (checkers[slot:] + checkers[:slot])[: 2 * needed - 1]
            blocks = tuple(sorted(drawn[slot::slots]))
            yield SumSpotCheck(
                body.round, signed.signer, part * slots + slot, answered, blocks, tuple(order), needed
            )


def drawn_blocks(vertex: Digest, part: int, blocks: int, share: float) -> list[int]:
    """Different blocks of a part; their mean number is this share of all."""
    wanted = share * blocks
    more = draw_below(vertex, f"one block more of part {part}", CHANCES) < (wanted % 1.0) * CHANCES
    count, drawn = min(blocks, int(wanted) + more, OPENED_BLOCKS_MAX), dict[int, None]()
    at = 0
    while len(drawn) < count:
        drawn[draw_below(vertex, f"block {at} of part {part}", blocks)] = None
        at += 1
    return list(drawn)
