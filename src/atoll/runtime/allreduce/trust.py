"""Checks among members that may lie: collision-resistant digests and sums that can be verified.

A group with `trust = "private"` names bytes by a fast hash and trusts its owners. Other groups use BLAKE3 and
combine rows by the group's statistic. Where results are opened, encoded bytes are cut into leaves.

Not responsible for: deciding which peer is right (the vertices do).
"""

from __future__ import annotations

from blake3 import blake3
from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.errors import RunFailedError, UsageError
from atoll.base.ids import Digest
from atoll.base.machine import Payload
from atoll.base.units import counted_text
from atoll.crypto.digest import Buffer, digest
from atoll.peer.settings import RunSettings
from atoll.peer.tasks import BuildSumOpening, JudgeSumOpening, JudgmentResult, SumOpeningBuilt
from atoll.policy.capability_terms import OPENED_SHARE, SumCheckTerms
from atoll.policy.fault_tolerance import CAPTURED, DISTANCES, StatisticName, peers_for_one_liar
from atoll.policy.presets import UNCHECKED
from atoll.protocol.allreduce.tasks import CombineRows, ComputeRowProducts, ProductsComputed
from atoll.runtime.storage.store import PeerStore
from atoll.training.codec import Codec, codec_named
from atoll.training.codec.blocks import Room
from atoll.training.exchange.combine import CombinedPart as Made
from atoll.training.exchange.combine import combine
from atoll.training.exchange.distance_weights import compare_rows
from atoll.training.exchange.statistic import RowCombinationRule
from atoll.verification.sum_check.tensors import LeafLayout, PartResultClaim, judge, opening_problem
from atoll.verification.sum_check.wire_digests import Encode, WireDigestCache
from atoll.wire.codec import decode_statement
from atoll.wire.messages.statements import Commitment
from atoll.wire.opening import opening_bytes

TOLERANCE = 0.33
TRUSTS = ("private", "community", "open")


def distrusting(
    settings: RunSettings, trust: str, statistic: StatisticName, up: str, down: str, peers: int
) -> RunSettings:
    """Group settings for this level of trust. UsageError for settings that withstand no liar."""
    if trust not in TRUSTS:
        raise UsageError("E-RED-14", f"no trust {trust!r}", fix=f"choose one of {', '.join(TRUSTS)}")
    if trust == "private":
        if statistic != "mean":
            raise UsageError(
                "E-RED-14",
                f'statistic = "{statistic}" withstands liars, but trust = "private" assumes that there are none',
                fix='use trust = "community", or statistic = "mean"',
            )
        return settings
    if trust == "open" and statistic in DISTANCES:
        raise UsageError(
            "E-RED-14",
            f'statistic = "{statistic}" cannot work with trust = "open"',
            cause=UNCHECKED,
            fix='use trust = "community", where openings check the sums of owners; or statistic = "trimmed_mean", '
            '"median" or "meamed"',
        )
    least = peers_for_one_liar(TOLERANCE, statistic)
    if peers < least:
        raise UsageError(
            "E-RED-14",
            f'trust = "{trust}" with statistic = "{statistic}" withstands no liar among '
            + counted_text(peers, "peer"),
            fix=f'use peers = {least} or more; or trust = "private", if members do not lie',
        )
    if settings.topology not in ("auto", "butterfly", "star"):
        raise UsageError(
            "E-RED-14",
            f'topology = "{settings.topology}" with trust = "{trust}"',
            cause="rows are combined on the way, so a relaying member could misreport the rows below it",
            fix='use topology = "butterfly" (or "star", or "auto"), or trust = "private"',
        )
    _check_codecs(trust, up, down)
    rounds = replace(settings.round, quorum="two-thirds")
    # with fewer members the rule withstands no liar, so the group waits
    more: dict[str, object] = {
        "round": rounds,
        "statistic": statistic,
        "tolerance": TOLERANCE,
        "min_peers": least,
    }
    problem = opening_problem(up, down)
    if trust == "open":
        settings = replace(settings, witnessed=True, captured=UNSET if problem else CAPTURED)
        if problem:
            return replace(settings, **more)
    if problem:
        words = problem.replace("sync.up", "codec").replace("sync.down", "way_back")
        raise UsageError("E-RED-14", f"owners could not be checked: {words}", fix='use codec = "int8" or "fp32"')
    return replace(settings, openings=SumCheckTerms(OPENED_SHARE, LeafLayout(codec_named(down)).leaf_bytes), **more)


def _check_codecs(trust: str, up: str, down: str) -> None:
    """UsageError for codecs with results that members cannot compare, or with places that liars know."""
    if "lowrank" in f"{up} {down}":
        raise UsageError(
            "E-RED-14",
            f'codec or way_back = "lowrank" with trust = "{trust}"',
            cause="rows decode by the shapes of the reader's own tensors, so results cannot be compared",
            fix='use codec = "topk:0.1+int8" with trust = "open", or trust = "private"',
        )
    if "randk" in f"{up} {down}":
        raise UsageError(
            "E-RED-14",
            f'codec or way_back = "randk" with trust = "{trust}"',
            cause="its places follow from the number of the call, which liars know in advance",
            fix='use codec = "topk:0.1+int8" with trust = "open", or trust = "private"',
        )
    if trust == "open" and not codec_named(down).same_everywhere:
        raise UsageError(
            "E-RED-14",
            f'answers in "{down}" with trust = "open"',
            cause="compressors differ between versions, and results are compared byte by byte",
            fix=f'use way_back = "{codec_named(down).name.rpartition("+")[0]}"',
        )


class VerifiableReduceArithmetic:
    """Arithmetic and digests of one member of such a group."""

    def __init__(self, store: PeerStore, up: str, down: str, opened: bool) -> None:
        self.store, self.up = store, codec_named(up)
        self._opened = WireDigestCache(up, down) if opened else None

    def made(self, codec: Codec, encode: Encode) -> Payload:
        """Encode a local row or result and compute its digest on the way."""
        if self._opened is not None:
            wire, name = self._opened.of_mine(codec, encode)
        else:
            hashed = blake3()
            wire = encode(codec.with_hashing(lambda stretch: hashed.update(memoryview(stretch).cast("B"))))
            name = Digest(hashed.digest())
        return Payload(name, memoryview(wire).nbytes, wire)

    def digest_of(self, message: object, payload: Buffer) -> Digest:
        return digest(payload) if self._opened is None else self._opened.of_arrived(message, payload)

    def combine(
        self, work: CombineRows, values: int, up: Codec, down: Codec, room: Room
    ) -> tuple[Made, Payload | None]:
        rows, done = [(row.weight, row.payload.data) for row in work.rows], Made(None, (), ())

        def encode(down: Codec) -> Buffer:
            nonlocal done
            statistic = RowCombinationRule(work.statistic, work.liars, work.weights)
            done = combine(rows, values, up, down, statistic, room)
            return done.wire or b""

        payload = self.made(down, encode)
        return done, None if done.wire is None else payload

    def compare(self, work: ComputeRowProducts, values: int) -> ProductsComputed:
        done = compare_rows([(row.weight, row.payload.data) for row in work.rows], values, self.up)
        counted = tuple(work.rows[i].peer for i in done.counted)
        return ProductsComputed(done.products, counted, tuple(work.rows[i].peer for i, _ in done.faults))

    def lay_open(self, work: BuildSumOpening) -> SumOpeningBuilt:
        return SumOpeningBuilt(tuple(self.store.put_blob(opening_bytes(one)) for one in self._names.lay_out(work)))

    def judge(self, work: JudgeSumOpening, values: int) -> JudgmentResult:
        names, shown = self._names, self.store.read_blob(work.blob)
        if shown is None:
            raise RunFailedError("E-AUD-03", "the blobs of this opening are no longer stored")
        statistic = RowCombinationRule(work.statistic, work.liars, work.weights)
        claimed = PartResultClaim(work.answered, work.commits, values, work.blocks, statistic)
        (finding, why), others = judge(claimed, shown, names.up, names.down)
        return JudgmentResult(finding, why, others)

    @property
    def _names(self) -> WireDigestCache:
        if self._opened is None:
            raise RunFailedError("E-AUD-03", "results of this group are not opened")
        return self._opened


def values_of(work: JudgeSumOpening) -> int:
    """Values of the whole call, as its contributors committed to it."""
    commits = (decode_statement(signed.body, signed.signer) for signed in work.commits)
    return next(commit.values for commit in commits if isinstance(commit, Commitment))
