"""Owners that check each other: who said what about a part, what is known to be true of it, and who lied.

Where owners are not trusted, the first w + 1 of a part all combine it and sign what they got; the first one shows
the bytes only when it has heard the others. An answer is *believed* when all of them say the same, since hardly
ever all of them lie, or when I recomputed it from rows that their authors committed to. A part about which they
differ, or of which one has not spoken in time, is *doubted*: its rows are opened to me, and I recompute every
answer that was signed for it. Of what proves true the answer with most contributors stands.
An owner is called a liar only for what it signed: bytes that its contributors' rows do not make, or two answers in
one slot. It is judged by the rows that it names: an author may have committed to one row before it and to another
before me.
In a large committee a jury, drawn for each part, opens the rows for all, and an answer is believed for what owners
and jury sign alone: the same at everybody. Whoever is not on it asks for no row, and calls nobody a liar.
Never believes an answer for who gave it, never asks for a row without end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.base.machine import Effect, Emit, Fact, Payload, RunTask, Send
from atoll.base.memoize import of_the_same
from atoll.crypto.digest import digest
from atoll.protocol.allreduce.buffers import ReceivedResult, StoredRow
from atoll.protocol.allreduce.plan import ReducePlan
from atoll.protocol.allreduce.tasks import CombineRows, RowsCombined, TaskRow
from atoll.wire.codec import encode
from atoll.wire.messages.round import RowRequest
from atoll.wire.messages.statements import Commitment, Lapse, OwnerResult, SignedStatement
from atoll.wire.opening import rows_of

Rows = Digest  # names contributors and what they committed to: sooner compared than a hundred names
Kind = tuple[Rows, Digest]  # of answer: all that say the same of the same rows are of one kind

WORDS_PER_OWNER = 2  # signed answers of one owner for one part: a second one is evidence, a third no news
ROWS_PATIENCE = 3  # looks, a second each, until rows for a jury are asked for again: a hundred may be on their way
SAID_LAST = 1024  # answers that are remembered by their short names: of all owners and juries of a round
ASKS_MAX = 6  # for one row, of one holder after the other; then its answer stays unproven


class PartDisputed(Fact, frozen=True, kw_only=True, tag="Doubted"):
    """The owners of this part do not say the same in time: I recompute it."""

    phase = "share"
    part: int
    answers: int  # different ones


class OwnerLied(Fact, frozen=True, kw_only=True, tag="Lied"):
    """This owner signed an answer that its contributors' rows do not make."""

    phase = "trust"
    peer: PeerId
    part: int
    statement: SignedStatement


class OwnerContradicted(Fact, frozen=True, kw_only=True, tag="Contradicted"):
    """This owner signed two different answers for one slot."""

    phase = "trust"
    peer: PeerId
    part: int
    first: SignedStatement
    second: SignedStatement


class CommitmentsDiffer(Fact, frozen=True, kw_only=True, tag="OtherRows"):
    """This owner heard other commitments of these contributors than I did: it should see mine."""

    phase = "share"
    owner: PeerId
    contributors: tuple[PeerId, ...]


class ResultForms(NamedTuple):
    """An answer in forms that are quick to compare."""

    named: Digest  # what is said, whoever says it
    kind: Kind
    names: frozenset[PeerId]


def _said(answered: OwnerResult) -> ResultForms:
    words = replace(answered, owner_index=0)
    rows = digest(encode(replace(words, digest=ZERO_DIGEST, size_bytes=0)))
    return ResultForms(digest(encode(words)), (rows, answered.digest), frozenset(answered.contributors))


said = of_the_same(_said, SAID_LAST)


class SignedResult:
    """An answer, and who signed it."""

    def __init__(self, statement: SignedStatement, answered: OwnerResult) -> None:
        self.statement, self.answered = statement, answered
        self.named, self.kind, self.names = said(answered)

    @property
    def rows(self) -> Rows:
        return self.kind[0]


@dataclass
class PartDispute:
    """One part."""

    words: list[SignedResult] = field(default_factory=list[SignedResult])
    said_by: dict[Kind, set[int]] = field(default_factory=dict[Kind, set[int]])  # owner indices, by what they said
    bytes_of: dict[Digest, Payload] = field(default_factory=dict[Digest, Payload])  # answers shown or recomputed
    rows: dict[PeerId, StoredRow] = field(default_factory=dict[PeerId, StoredRow])  # opened to me
    makes: dict[Rows, Digest | None] = field(
        default_factory=dict[Rows, Digest | None]
    )  # their answer, if there is one
    checks: dict[Rows, SignedResult] = field(
        default_factory=dict[Rows, SignedResult]
    )  # recomputed, or just being: one of each
    asked: Counter[PeerId] = field(default_factory=Counter[PeerId])  # for whose row, how often
    blamed: set[int] = field(default_factory=set[int])  # owner indices
    compared: set[PeerId] = field(default_factory=set[PeerId])  # owners whose rows are not those that I know of
    same: dict[Rows, bool] = field(default_factory=dict[Rows, bool])  # are they what their authors committed to?
    doubted: bool = False
    rows_come: bool = False  # since the last look
    silent_for: int = 0  # looks without a row, since they were asked for
    # what follows from words and recomputed answers: asked with every row and at every look, hardly ever new
    belief: dict[Digest, bool | None] = field(default_factory=dict[Digest, bool | None])  # by what words say
    standing: tuple[int, bool] | None = None  # kinds of answers, and whether of any nobody knows if it is true
    settled: dict[bool, ReceivedResult | None] = field(
        default_factory=dict[bool, ReceivedResult | None]
    )  # by patience
    asked_all: bool = False  # every row that is needed was asked for once
    # asked with every row, so kept as short as it can be: many say the same
    unmade: dict[Digest, SignedResult] = field(
        default_factory=dict[Digest, SignedResult]
    )  # not recomputed yet: one of all alike
    uncompared: list[SignedResult] = field(
        default_factory=list[SignedResult]
    )  # by owners: are their rows those that I know of?
    lacks: dict[Digest, PeerId] = field(default_factory=dict[Digest, PeerId])  # whose row was not here
    unheard: dict[Rows, PeerId] = field(default_factory=dict[Rows, PeerId])  # the same of a commitment

    def changed(self) -> None:
        """There is another word, or another recomputed answer."""
        self.belief.clear()
        self.settled.clear()
        self.standing, self.asked_all = None, False

    def show(self, payload: Payload) -> None:
        """The bytes of an answer that somebody signed, if it is one."""
        if any(w.answered.digest == payload.digest for w in self.words):
            self.bytes_of[payload.digest] = payload
            self.settled.clear()


class CrossCheck:
    """`row_of(part, peer)` is a row that I hold anyway; `judges` is False for those who have no vote."""

    def __init__(
        self,
        plan: ReducePlan,
        me: PeerId,
        row_of: Callable[[int, PeerId], StoredRow | None],
        commit_of: Callable[[PeerId], Commitment | None],
        gone: Callable[[PeerId], bool],
        judges: bool,
        two_faced: Container[PeerId] = (),
    ) -> None:
        self.plan, self.me, self.row_of = plan, me, row_of
        self.commit_of, self.gone, self.judges, self.two_faced = commit_of, gone, judges, two_faced
        self.cases = [PartDispute() for _ in range(plan.parts)]

    # ---- what is said --------------------------------------------------------------------------------------

    def hear(self, signed: SignedStatement, answered: OwnerResult, payload: Payload | None) -> list[Effect]:
        """A checked answer by its owner, shown or only signed."""
        case, effects = self.cases[answered.part], list[Effect]()
        earlier = [w for w in case.words if w.answered.owner_index == answered.owner_index]
        if all(w.answered != answered for w in earlier) and len(earlier) < WORDS_PER_OWNER:
            word = SignedResult(signed, answered)
            case.words.append(word)
            case.changed()
            if word.rows not in case.checks:
                case.unmade.setdefault(word.named, word)
            stands_in = self.plan.stands_in(answered.part, answered.owner_index)
            if stands_in or answered.owner_index < len(self.plan.owners(answered.part)):
                case.uncompared.append(word)  # a jury shows what it heard itself
            if not stands_in:  # what only reserves say is always made again: there are more of them than may lie
                case.said_by.setdefault(word.kind, set()).add(answered.owner_index)
            if earlier:
                first = earlier[0].statement
                fact = OwnerContradicted(peer=signed.signer, part=answered.part, first=first, second=signed)
                effects.append(self._report(fact))
        if payload is not None:
            case.show(payload)
        return effects + self._blame(answered.part)

    def spoken(self, part: int) -> set[PeerId]:
        return {w.statement.signer for w in self.cases[part].words}

    def nearly(self, part: int) -> bool:
        """A few words more would be enough: they may have been lost."""
        plan = self.plan
        return 4 * max(map(len, self.cases[part].said_by.values()), default=0) > 3 * plan.verdict

    def seconded(self, answered: OwnerResult) -> tuple[SignedStatement, ...]:
        """Words that say this of the same rows, by others than whose it is."""
        named, words = said(answered).named, self.cases[answered.part].words
        alike = (w for w in words if w.named == named and w.answered.owner_index != answered.owner_index)
        return tuple(word.statement for word in alike)

    def made_again(self, answered: OwnerResult) -> bool:
        """I doubted it, and made it again of rows that were opened to me."""
        rows, digest = said(answered).kind
        return self.cases[answered.part].makes.get(rows) == digest

    def words_of(self, signer: PeerId) -> list[SignedResult]:
        return [w for case in self.cases for w in case.words if w.statement.signer == signer]

    # ---- what is true --------------------------------------------------------------------------------------

    def believes(self, answered: OwnerResult) -> bool | None:
        """True, False, or None while nobody knows."""
        return self._believes(self.cases[answered.part], said(answered).kind)

    def _believes_word(self, word: SignedResult) -> bool | None:
        """The same of a word of ours."""
        case = self.cases[word.answered.part]
        if word.named not in case.belief:
            case.belief[word.named] = self._believes(case, word.kind)
        return case.belief[word.named]

    def _believes(self, case: PartDispute, kind: Kind) -> bool | None:
        rows, digest = kind
        plan, made = self.plan, case.makes.get(rows, digest) if case.makes else digest
        if made != digest:
            return False
        by = case.said_by.get(kind, ())
        if not plan.juries:
            return True if rows in case.makes or len(by) > plan.witnesses else None
        # my own look counts as one word: where each believed its own, no body would be believed by most
        alike = len(by) >= plan.verdict or sum(index <= plan.witnesses for index in by) > plan.witnesses
        return True if alike else None

    def settled(self, part: int, patient: bool) -> ReceivedResult | None:
        """The answer that stands, once its bytes are here. While `patient`, a larger one may still prove true."""
        case = self.cases[part]
        if patient not in case.settled:
            case.settled[patient] = self._settled(part, patient)
        return case.settled[patient]

    def _settled(self, part: int, patient: bool) -> ReceivedResult | None:
        case = self.cases[part]
        for word in self._largest_first(part) if case.bytes_of else ():
            believed = self._believes_word(word) if self.judges else True
            if believed and (payload := case.bytes_of.get(word.answered.digest)) is not None:
                return ReceivedResult(word.statement, word.answered, payload)
            if believed or (believed is None and patient):
                return None
        return None

    def unseen(self, part: int) -> OwnerResult | None:
        """An answer that is believed, and whose bytes are not here."""
        case = self.cases[part]
        words = (w for w in case.words if w.answered.digest not in case.bytes_of)
        return next((word.answered for word in words if self._believes_word(word)), None)

    def in_doubt(self, part: int) -> bool:
        """Of some answer nobody knows yet whether it is true: asked at every look, since it is hardly ever so."""
        return self.judges and bool(self.cases[part].words) and self._standing(part)[1]

    def look(self, part: int, waiting: bool, again: bool = False) -> list[Effect]:
        """Doubt what there is to doubt. `waiting`: an owner may still speak. `again`: ask for rows again."""
        case = self.cases[part]
        if not self.in_doubt(part):
            return []
        differ, _ = self._standing(part)
        if differ == 1 and waiting:
            return []
        effects: list[Effect] = []
        if not case.doubted:
            case.doubted = True
            effects.append(self._report(PartDisputed(part=part, answers=differ)))
        effects += self._compare_rows(part)
        return effects + self._ask_rows(part, again) + self._recompute(part) if self._opens(part) else effects

    def _standing(self, part: int) -> tuple[int, bool]:
        """How many kinds of answers there are, and whether of any of them I do not know if it is true."""
        case = self.cases[part]
        if case.standing is None:
            kinds = len({w.kind for w in case.words})
            case.standing = kinds, any(self._believes_word(w) is None for w in case.words)
        return case.standing

    def wants(self, part: int, peer: PeerId) -> bool:
        case = self.cases[part]
        if not case.doubted or not self._opens(part) or self._row(part, peer) is not None:
            return False
        return any(peer in w.names and self._believes_word(w) is None for w in case.words)

    def take(self, part: int, peer: PeerId, row: StoredRow) -> list[Effect]:
        case = self.cases[part]
        case.rows[peer], case.rows_come = row, True
        return self._recompute(part)

    def bytes_of(self, answered: OwnerResult) -> Payload:
        """Of an answer that I made again."""
        return self.cases[answered.part].bytes_of[answered.digest]

    def found(self, part: int, patient: bool) -> OwnerResult | None:
        """What I made again and can speak for: the largest answer that its rows make."""
        makes = self.cases[part].makes
        for word in self._largest_first(part) if makes else ():
            if self.made_again(word.answered):
                return word.answered
            if patient and word.rows not in makes:
                return None
        return None

    def recomputed(self, part: int, check: int, result: RowsCombined) -> list[Effect]:
        case = self.cases[part]
        checked = list(case.checks.values())[check]
        # who does not decode cannot have been counted
        whole = result.payload if result.counted == checked.answered.contributors else None
        case.makes[checked.rows] = whole.digest if whole is not None else None
        case.changed()
        if whole is not None:
            case.show(whole)
        return self._blame(part)

    def _compare_rows(self, part: int) -> list[Effect]:
        case, unknown, effects = self.cases[part], list[SignedResult](), list[Effect]()
        for word in case.uncompared:
            owner, names = word.statement.signer, word.answered.contributors
            same = self.same_rows(word.answered)
            if same is None:
                unknown.append(word)
            elif not same and owner not in case.compared:
                case.compared.add(owner)
                effects.append(self._report(CommitmentsDiffer(owner=owner, contributors=names)))
        case.uncompared = unknown
        return effects

    def _blame(self, part: int) -> list[Effect]:
        case, effects = self.cases[part], list[Effect]()
        for word in case.words if case.makes else ():
            index = word.answered.owner_index
            made = case.makes.get(word.rows, word.answered.digest)
            if made != word.answered.digest and index not in case.blamed:
                case.blamed.add(index)
                effects.append(
                    self._report(OwnerLied(peer=word.statement.signer, part=part, statement=word.statement))
                )
        return effects

    def _recompute(self, part: int) -> list[Effect]:
        case, plan, effects = self.cases[part], self.plan, list[Effect]()
        for word in list(case.unmade.values()):
            if self._lacks_a_row(case, word):
                continue
            if word.rows in case.checks:
                del case.unmade[word.named]
                continue
            names = word.answered.contributors
            if not self.same_rows(word.answered):
                continue
            rows: list[StoredRow] = []
            for name in names:
                row = self._row(part, name)
                if row is None:
                    case.lacks[word.named] = name
                    break
                rows.append(row)
            if len(rows) < len(names):
                continue
            case.checks[word.rows] = word
            del case.unmade[word.named]
            given = tuple(TaskRow(n, r.weight, r.payload, (n,)) for n, r in zip(names, rows, strict=True))
            job = f"combine/{plan.round}/{plan.attempt}/judge/{len(case.checks) - 1}/{part}"
            work = CombineRows(plan.round, part, plan.shares, given, False, plan.statistic, plan.liars)
            effects.append(RunTask(job, work))
        return effects

    def _lacks_a_row(self, case: PartDispute, word: SignedResult) -> bool:
        """The row that was not here when I last looked is not here yet: one look for every row that comes."""
        name = case.lacks.get(word.named)
        return name is not None and self._row(word.answered.part, name) is None

    # ---- opening -------------------------------------------------------------------------------------------

    def _ask_rows(self, part: int, again: bool) -> list[Effect]:
        """Its author first, then whoever says that it has counted it, in turn; where these are gone, anybody."""
        case, plan, effects = self.cases[part], self.plan, list[Effect]()
        if case.asked_all and not again:
            return []
        if again and self._rows_on_their_way(case):
            return []
        case.asked_all = True
        for name in sorted(self._named(part)):
            times = case.asked[name]
            if times >= ASKS_MAX or (times and not again) or self._row(part, name) is not None:
                continue
            counters = [w.statement.signer for w in self._by_owners(part) if name in w.answered.contributors]
            holders = [p for p in dict.fromkeys([name, *counters]) if p != self.me and not self.gone(p)]
            holders = holders or [p for p in plan.listeners if p != self.me and not self.gone(p)]
            case.asked[name] += 1
            if holders:
                wish = RowRequest(plan.round, plan.attempt, plan.trace, part, name)
                effects.append(Send(holders[times % len(holders)], wish))
        return effects

    def _rows_on_their_way(self, case: PartDispute) -> bool:
        """Rows are large: while some of a part come, so may the rest, and many take a while before the first."""
        if case.rows_come:
            case.rows_come, case.silent_for = False, ROWS_PATIENCE
            return True
        case.silent_for += 1
        if self.plan.juries and case.silent_for < ROWS_PATIENCE:
            return True
        case.silent_for = 0
        return False

    def _named(self, part: int) -> set[PeerId]:
        """Whose rows it takes to know what is not known yet."""
        unknown = {w.rows: w.names for w in self.cases[part].words if self._believes_word(w) is None}
        return set[PeerId]().union(*unknown.values())

    def same_rows(self, answered: OwnerResult) -> bool | None:
        """Was it made of the rows that its contributors committed to before me? None while I lack a commitment.

        The first commitment of an attempt counts, so an answer stays good.
        """
        case, rows = self.cases[answered.part], said(answered).kind[0]
        if rows not in case.same:
            if rows in case.unheard and self.commit_of(case.unheard[rows]) is None:
                return None
            known: list[Commitment] = []
            for name in answered.contributors:
                commit = self.commit_of(name)
                if commit is None:
                    case.unheard[rows] = name
                    return None
                known.append(commit)
            case.same[rows] = rows_of(known) == answered.rows
        return case.same[rows]

    def _row(self, part: int, peer: PeerId) -> StoredRow | None:
        return self.row_of(part, peer) or self.cases[part].rows.get(peer)

    # ---- who failed ----------------------------------------------------------------------------------------

    def lapses(self, part: int, stands: OwnerResult | None, late: bool) -> dict[PeerId, Lapse]:
        """Owners that failed this part without a lie that could be proven; nobody who is gone."""
        found: dict[PeerId, Lapse] = {}
        spoken = self.spoken(part)
        for owner in self.plan.watchers(part):
            if late and spoken and owner not in spoken and owner != self.me and not self.gone(owner):
                found[owner] = "withheld"
        for word in self._by_owners(part):
            known, names = self._believes_word(word), word.names
            doubtful = late and known is None and self._opens(part) and not self.made_again(word.answered)
            if doubtful and not any(name in self.two_faced for name in names):
                found[word.statement.signer] = "unopened"
            elif known and stands is not None and names < set(stands.contributors):
                found[word.statement.signer] = "censored"
        found.pop(self.me, None)
        return found

    # ---- small words ---------------------------------------------------------------------------------------

    def _opens(self, part: int) -> bool:
        return self.plan.opens(part, self.me)

    def _by_owners(self, part: int) -> list[SignedResult]:
        """Without the jury's, which stand in no body."""
        takers, words = len(self.plan.takers(part)), self.cases[part].words
        return [w for w in words if w.answered.owner_index < takers] if self.plan.juries else words

    def _largest_first(self, part: int) -> list[SignedResult]:
        """Of equally large ones those that I can judge, so that nobody waits for what adds nothing."""

        def place(word: SignedResult) -> tuple[int, bool, int]:
            unknown = self.judges and self._believes_word(word) is None and not self.made_again(word.answered)
            return -len(word.answered.contributors), unknown, word.answered.owner_index

        return sorted(self._by_owners(part), key=place)

    def _report(self, fact: Fact) -> Emit:
        return Emit(replace(fact, round=self.plan.round, trace=self.plan.trace))
