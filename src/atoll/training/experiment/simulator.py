"""All members of a run in one process: what `experiment` steps through, round by round.

Members train (`worker`), send, hear and merge as real ones do, one after the other; a fragment between sending and
applying is a `InFlightFragment`. Whoever is away, late, slow, lies, is not drawn or has an anchor of its own is
played here.
Promises: the same arguments give the same bits; bytes are counted where they are sent (`traffic`).
Never opens a socket, never looks at a clock, never checks what it was asked for: `experiment` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from msgspec import UNSET
from torch import Tensor, nn

from atoll.base.arguments import arguments
from atoll.base.draw import in_pairs
from atoll.base.ids import Digest
from atoll.base.workload import WorkloadPolicy
from atoll.crypto.digest import digest
from atoll.training.codec import Codec
from atoll.training.data import Data, epoch_samples, validation
from atoll.training.exchange.combine import gather
from atoll.training.exchange.layout import flatten, layout_of
from atoll.training.experiment.adversaries import decoded, lying, readable
from atoll.training.experiment.client_draw import ClientSampler
from atoll.training.experiment.faults import FaultSpec
from atoll.training.experiment.member import SimulatedMember
from atoll.training.experiment.plots import draw_outcomes
from atoll.training.experiment.round_clock import RoundClock
from atoll.training.experiment.traffic import TrafficCounter
from atoll.training.experiment.two_level import RegionServers
from atoll.training.recipe.gradient import ComputeOptions, Loss
from atoll.training.recipe.inner import PipelinedGradients
from atoll.training.recipe.local_anchor import LocalAnchor
from atoll.training.recipe.merge import merge, where_moved
from atoll.training.recipe.moments import inherited, take_in
from atoll.training.recipe.outer import (
    PLAIN,
    AgreementNesterov,
    MomentAverage,
    Outer,
    RegionalNesterov,
    UpdateConditions,
    agreed_moments,
    fresh_outer,
    momentum_of,
    move,
)
from atoll.training.recipe.recipes import Recipe, UpdateCoding, closing, coding_at, swarm_problem
from atoll.training.recipe.reducer import agreement, answered, arrived, made_of, reduced, weight_of
from atoll.training.recipe.schedule import fragments_of, moments_due, phase_at
from atoll.training.recipe.state import SharedState, state_bytes, state_hash
from atoll.training.recipe.update import (
    Bounds,
    EncodedUpdate,
    RoundInputs,
    encode_update,
    moved,
    part_bounds,
    part_codecs,
    settle,
    tensor_sizes,
    tensors_of,
)


@dataclass(frozen=True)
class SyncRecord:
    """One fragment, synchronised once. Bytes and rounds count from the beginning, bytes for an average peer."""

    step: int
    fragment: int
    members: tuple[int, ...]
    counted: tuple[int, ...]  # whose updates are in it
    train_loss: float  # mean of the steps since the rounds before
    upload_bytes: float
    download_bytes: float
    batch: int = 0  # samples of its steps


@dataclass(frozen=True)
class ExperimentResult:
    val_loss: float  # of the agreed model, nats per token or image
    live_loss: float  # of the mean of live parameters just before the last round: what a closing average would give
    upload_ratio: float | None  # times fewer bytes than ring data parallelism; None where nothing is sent
    download_ratio: float | None
    upload_bytes: float  # of an average peer, whole run
    download_bytes: float
    steps: int
    rounds: int  # synchronisations of the first fragment
    curve: tuple[tuple[int, float], ...]  # (step, validation loss)
    history: tuple[SyncRecord, ...]
    model_F: Tensor  # the agreed model as one flat vector
    state: Digest | None  # what real rounds would name it; None where they cannot do this, or members never agree

    @arguments("Outcome.plot", "E-PLOT-03")
    def plot(self, path: Path | str, name: str = "this recipe", **others: ExperimentResult) -> None:
        """Draw its losses over steps and bytes, beside those of others by name: done.plot("a.png", auto=other)."""
        draw_outcomes({name: self, **others}, path)


@dataclass
class InFlightFragment:
    """A fragment between sending and applying."""

    fragment: int
    lo: int
    hi: int
    begun: int  # step of the run before its turn: what the outer step's rate and momentum go by, as in real rounds
    lands_at: int
    sent: dict[int, Tensor]  # member -> its live parameters as they were sent
    combined: dict[int, Tensor] = field(default_factory=dict)  # anchor -> update
    mean_anchor: dict[int, Tensor] = field(default_factory=dict)
    agreement: Tensor | float = 1.0
    learned: int = 1  # what it counts where the outer step is Delayed: an update, or the tokens behind a round


class ExperimentSimulator:
    """A run of a recipe in one process, to be looked into between steps."""

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        data: Data | list[Data],
        peers: int,
        steps: int,
        trouble: FaultSpec,
        loss: Loss,
        order: Sequence[int] | None = None,
        effort: WorkloadPolicy | None = None,
        only: Sequence[str] = (),
    ) -> None:
        self.recipe, self.steps, self.trouble, self.loss = recipe, steps, trouble, loss
        self.order = range(peers) if order is None else order
        self.rhythm = RoundClock(recipe, steps, peers, effort, trouble)
        self.own_data = isinstance(data, list)
        # worker -> its data, which of how many shares of them are its own
        self.shares = (
            [(one, 0, 1) for one in data] if isinstance(data, list) else [(data, w, peers) for w in range(peers)]
        )
        self.held_out = self.shares[0][0]
        self.layout = layout_of(model, only)
        self.fragments = fragments_of(self.layout, recipe.schedule.fragments)
        how = recipe.computing or ComputeOptions(), loss
        self.workers = [SimulatedMember(model, len(self.fragments), self.layout, *how) for _ in range(peers)]
        self.viewer = SimulatedMember(model, 0, self.layout)  # its model is looked at, never trained
        self.present = list(range(peers))
        self.clients: ClientSampler | None = None  # where not everybody trains in every round
        self.drawn_for = -1  # which of them they were drawn for
        self.records: tuple[int, ...] = ()  # by peer, where they decide what rows weigh
        first_F, _ = flatten(model, self.layout)
        anchors, self.regions = peers if recipe.paired else 1, None
        if isinstance(recipe.outer, RegionalNesterov):
            anchors = recipe.outer.regions
            self.regions = RegionServers(recipe.outer, first_F, self.layout.parameters)
        self.anchors = [first_F.clone() for _ in range(anchors)]
        self.outers = [
            [fresh_outer(recipe.outer, self._inside(*f)) for f in self.fragments] for _ in range(anchors)
        ]
        self.momentum_P = torch.zeros(self.layout.parameters, dtype=torch.float32)  # what codecs may build on
        eager = recipe.reducer.own == "fresh"
        self.own = [LocalAnchor(first_F, self.momentum_P.clone()) for _ in range(peers)] if eager else []
        self.owed: dict[int, Tensor] = {}  # owner -> what its answers left out, over the whole vector
        self.flights: list[InFlightFragment] = []
        self.traffic = TrafficCounter(peers)
        self.history: list[SyncRecord] = []
        self.launched = 0
        self.first_round = 0  # number of its first round, before which a real run has some without training
        self.train_loss = float("nan")
        self.now = 0  # steps done
        self.live_F = first_F  # mean of live parameters before the last round

    def _inside(self, lo: int, hi: int) -> int:
        """How many of lo … hi are parameters; the others are buffers."""
        return max(0, min(hi, self.layout.parameters) - lo)

    # ---- the story -----------------------------------------------------------------------------------------

    def whole(
        self, evaluate_every: int, samples: int, progress: Callable[[SyncRecord], object] | None
    ) -> ExperimentResult:
        curve = []
        while self.now < self.steps:
            for one in self.step():
                if progress is not None:
                    progress(one)
            if evaluate_every and self.now % evaluate_every == 0 and self.now < self.steps:
                curve.append((self.now, self.loss_at(self.agreed(), samples)))
        final = self.loss_at(self.agreed(), samples)
        up, down = self.traffic.ratios(self.layout.parameters, self.steps)
        return ExperimentResult(
            val_loss=final,
            live_loss=self.loss_at(self.live_F, samples),
            upload_ratio=up,
            download_ratio=down,
            upload_bytes=self.traffic.upload_bytes,
            download_bytes=self.traffic.download_bytes,
            steps=self.steps,
            rounds=sum(one.fragment == 0 for one in self.history),
            curve=(*curve, (self.steps, final)),
            history=tuple(self.history),
            model_F=self.agreed(),
            state=self.state(),
        )

    def step(self) -> list[SyncRecord]:
        """One step of the run, and the rounds that ended with it."""
        self.now += 1
        known = len(self.history)
        self._come_and_go(self.now)
        if self.clients is not None and self.drawn_for != self.launched:
            self.drawn_for = self.launched
            self.clients.draw(self._seed(), self.present)
        self.rhythm.go_on(self._training())
        for peer in self._training():
            if self.rhythm.takes(peer, self.now) and not self._passed(peer):
                rhythm, share, worker = self.rhythm, self.shares[peer], self.workers[peer]
                worker.cursor = rhythm.place(peer, worker.cursor)
                worker.train(rhythm.recipe, share, rhythm.rate_step(self.now - 1))
                rhythm.took(peer)
        if self.now == self.steps:
            self._close()
        else:
            self._land(self.now)
            self._synchronise(self.now)
        return self.history[known:]

    def _training(self) -> list[int]:
        """Who is here and takes part in the round under way."""
        return self.present if self.clients is None else [p for p in self.clients.drawn if p in self.present]

    def _passed(self, peer: int) -> bool:
        """It has made its passes over its data in this round."""
        schedule, (data, _, shares) = self.recipe.schedule, self.shares[peer]
        if schedule.epochs is UNSET:
            return False
        samples = epoch_samples(data, self.recipe.seq_len)
        return self.workers[peer].steps[0] >= schedule.steps_of(-(-samples // (shares * self.rhythm.recipe.batch)))

    def _come_and_go(self, step: int) -> None:
        present = [p for p in range(len(self.workers)) if not self.trouble.is_away(p, step)]
        for peer in present:
            if peer not in self.present:
                if self.recipe.paired and self.present:  # it takes another's: its own is old
                    self.anchors[peer].copy_(self.anchors[self.present[0]])
                if self.own:
                    self.own[peer] = LocalAnchor(self.anchors[0].clone(), self.momentum_P.clone())
                moments = isinstance(self.recipe.outer, MomentAverage)
                self.workers[peer].begin_again(self._anchor_of(peer), inherited(self.shared()) if moments else None)
                self.rhythm.came(peer)
        self.present = present

    def _synchronise(self, step: int) -> None:
        reducer = self.recipe.reducer
        if reducer.group == "one":
            for peer in self.present:
                self._alone(peer, step)
            if self.regions is not None and step == self.steps:
                for region in range(len(self.anchors)):
                    self._go_up(self.regions, region, step, last=True)
            return
        for fragment in self.rhythm.due(step):
            if not isinstance(self.recipe.inner, PipelinedGradients):
                for old in [f for f in self.flights if f.fragment == fragment]:
                    self._apply(old)
            flight = self._launch(fragment, step, self._coding(step), self._span(fragment))
            if flight is None:
                continue
            if flight.lands_at <= step:
                self._apply(flight)
            else:
                self.flights.append(flight)

    def _span(self, fragment: int) -> tuple[int, int]:
        """What of the vector its round carries: moments, too, where they are due."""
        lo, hi = self.fragments[fragment]
        return lo, hi + moments_due(self.recipe.schedule, len(self.history)) * self.layout.parameters

    def _close(self) -> None:
        """The last round waits for everything that is under way."""
        schedule = self.recipe.schedule
        for flight in list(self.flights):
            self._apply(flight)
        self.live_F = torch.stack([self.workers[peer].x_F for peer in self._training() or [0]]).mean(0)
        if schedule.closing:
            last = closing(self.recipe)
            self._close_whole(last.coding, last.outer)
        elif len(self.fragments) > 1:
            self._close_whole(self._coding(self.steps), self.recipe.outer)
        else:
            self._synchronise(self.steps)

    def _close_whole(self, coding: UpdateCoding, outer: Outer) -> None:
        """A last round that carries all fragments at once, as in real rounds."""
        whole = self._launch(0, self.steps, coding, (0, self.layout.floats))
        if whole is None:
            return
        for fragment, (lo, hi) in enumerate(self.fragments):
            cut = slice(lo, hi)
            agreed = whole.agreement[cut] if isinstance(whole.agreement, Tensor) else whole.agreement
            piece = InFlightFragment(
                *(fragment, lo, hi, whole.begun, whole.lands_at),
                sent={peer: sent_F[cut] for peer, sent_F in whole.sent.items()},
                combined={anchor: combined_F[cut] for anchor, combined_F in whole.combined.items()},
                agreement=agreed,
            )
            self._apply(piece, outer)

    # ---- one fragment --------------------------------------------------------------------------------------

    def _launch(
        self, fragment: int, step: int, coding: UpdateCoding, span: tuple[int, int] | None = None
    ) -> InFlightFragment | None:
        """Everybody who trains encodes and sends, of the fragment or of `span`; None if too few are here. All who
        are present own parts."""
        lo, hi = span or self.fragments[fragment]
        owners, members, reducer = list(self.present), list(self._training()), self.recipe.reducer
        if len(members) < max(1, reducer.peers_min):
            self.drawn_for = -1  # who is gone gives way to others
            return None
        self.launched += 1
        in_pairs = reducer.group == "pair"
        bounds = part_bounds(hi - lo, (1,) * (1 if reducer.group in ("pair", "server") else len(owners)))
        ups = self._codecs(coding.up, bounds, lo)
        updates = {peer: self._encoded(peer, lo, hi, bounds, ups, coding) for peer in members}
        villains = {peer: name for peer, name in self.trouble.villains.items() if peer in updates}
        if villains:
            updates |= lying(updates, villains, bounds, ups, lambda rows_GN: self._made_of(rows_GN, lo, hi))
        late = [self.trouble.lateness(peer) for peer in members]
        in_time, closes = arrived(reducer, late, self.recipe.hidden_steps)
        counted = [
            p for p, fine in zip(members, in_time, strict=True) if fine and not self.trouble.loses(self._seed(), p)
        ]
        counted = [p for p in counted if p not in villains or readable(updates[p], bounds, ups)]
        rows = [p for p in self.order if p in counted]
        waits = self.recipe.hidden_steps == 0 or step == self.steps
        _, phase = phase_at(self.recipe.schedule, step, self.steps)
        begun = self.rhythm.outer_step(max(0, step - phase.inner_steps // len(self.fragments)))
        flight = InFlightFragment(fragment, lo, hi, begun, step if waits else step + closes, {})
        for peer in members:
            flight.sent[peer] = self.workers[peer].x_F[lo:hi].clone()
            if peer in villains:
                continue  # it has nothing to make good
            if coding.beta:
                kept = settle(updates[peer], [peer in counted] * len(bounds), ups)
                self.workers[peer].memory_F[lo:hi] = kept
        if in_pairs:
            self._pair(flight, members, counted, updates, ups)
        else:
            self._reduce(flight, owners, rows, updates, bounds, ups, coding)
        outer = self.recipe.outer
        for peer, own in enumerate(self.own):
            assert isinstance(outer, PLAIN), "check_recipe refuses the others"
            if peer in updates and counted:
                own.sent(outer, decoded(updates[peer], bounds, ups), len(members), begun)
                own.agreed(outer, flight.combined[0], begun)
        if not counted and not in_pairs:
            flight.combined.clear()  # the model rests
        if self.clients is not None:
            self.clients.took_turns(counted)
        self._written(flight, step, members, counted)
        return flight

    def _encoded(
        self, peer: int, lo: int, hi: int, bounds: Bounds, ups: tuple[Codec, ...], coding: UpdateCoding
    ) -> EncodedUpdate:
        worker = self.workers[peer]
        begin, end = worker.progress(self.recipe.inner, self._anchor_of(peer), lo, hi)
        memory = worker.memory_F[lo:hi] if coding.beta else None
        return encode_update(begin, end, memory, bounds, ups, coding.beta)

    def _reduce(
        self,
        flight: InFlightFragment,
        owners: list[int],
        counted: list[int],
        updates: dict[int, EncodedUpdate],
        bounds: Bounds,
        ups: tuple[Codec, ...],
        coding: UpdateCoding,
    ) -> None:
        """Every part at its owner, as in a real round. Rows are added up in the order of `counted`."""
        reducer, n = self.recipe.reducer, flight.hi - flight.lo
        combined = torch.zeros(n, dtype=torch.float32)
        agreed = torch.ones(n, dtype=torch.float32) if isinstance(self.recipe.outer, AgreementNesterov) else None
        gathered = coding.answer == "gathered"
        downs = [None] * len(bounds) if gathered else self._codecs(coding.down, bounds, flight.lo)
        weights = {p: self._weight(p, flight.fragment) for p in counted}
        robust, whole_N = reducer.statistic == "robust", None
        if robust:  # owners add up the Gram matrices of their parts, so each knows the distances of whole rows
            sent = [(weights[p], decoded(updates[p], bounds, ups)) for p in counted]
            whole_N = made_of("robust", sent, (), len(updates))
        for part, ((a, b), up, down) in enumerate(zip(bounds, ups, downs, strict=True)):
            owner = owners[part % len(owners)]
            rows = [(weights[p], updates[p].wires[part]) for p in counted]
            here, remember = slice(flight.lo + a, flight.lo + b), coding.answer == "remembered"
            sizes = self._sizes(here.start, here.stop)
            owed_N = self.owed[owner][here] if owner in self.owed else None
            if robust:
                part_N = None if whole_N is None else whole_N[a:b]
                done = answered(part_N, down, owed_N, remember)
            else:
                done = reduced(reducer, rows, b - a, up, down, owed_N, remember, sizes, len(updates))
            if remember and done.memory_N is not None:
                owes_F = self.owed.setdefault(owner, torch.zeros(self.layout.floats, dtype=torch.float32))
                owes_F[here] = done.memory_N
            if done.value_N is not None:
                combined[a:b] = done.value_N
            if agreed is not None and len(rows) > 1:
                agreed[a:b] = agreement(rows, b - a, up)
            says = {p: len(updates[p].wires[part]) if p in updates else 0 for p in owners}
            extra = 4 if agreed is not None else 0
            if robust:
                extra += 8 * (len(rows) + 1) ** 2  # the part's Gram matrix, to every other owner
            self.traffic.part(owner, says, counted, None if gathered else done.sent_bytes + extra)
        flight.combined[0] = combined
        samples = sum(self.workers[p].samples[flight.fragment] for p in counted)
        flight.learned = samples * self.recipe.seq_len
        if agreed is not None:
            flight.agreement = agreed[: self._inside(flight.lo, flight.hi)]
        for peer in updates:
            worker = self.workers[peer]
            worker.steps[flight.fragment] = worker.samples[flight.fragment] = 0

    def _pair(
        self,
        flight: InFlightFragment,
        members: list[int],
        counted: list[int],
        updates: dict[int, EncodedUpdate],
        ups: tuple[Codec, ...],
    ) -> None:
        """Two by two; each pair also shows each other its anchors, in fp32."""
        lo, hi = flight.lo, flight.hi
        for pair in in_pairs(self.launched - 1, members):
            here = [p for p in pair if p in counted]
            for peer in pair:
                known = here if peer in here else [peer, *here]  # my own I always have
                rows = [(1, updates[p].wires[0]) for p in sorted(known)]
                mean_N = gather(rows, hi - lo, ups[0]).mean_N
                assert mean_N is not None
                flight.combined[peer] = mean_N
                anchors = [self.anchors[p][lo:hi] for p in sorted(known)]
                flight.mean_anchor[peer] = torch.stack(anchors).mean(0)
                if len(pair) == 2:
                    self.traffic.pair(peer, pair, len(updates[peer].wires[0]) + 4 * (hi - lo), peer in counted)

    def _alone(self, peer: int, step: int) -> None:
        """One worker's own round with whoever owns the parts: nobody else takes part, nobody waits."""
        worker, lo, hi = self.workers[peer], 0, self.layout.floats
        wanted = self._steps_of(peer)
        offset = wanted * peer // len(self.workers)  # not all in the same step
        if step < self.steps and (
            worker.steps[0] == 0 or (worker.steps[0] + offset * (worker.base_F is None)) < wanted
        ):
            return
        self.launched += 1
        near = [p for p in self.present if self._anchor_index(p) == self._anchor_index(peer)]
        bounds = part_bounds(hi, (1,) * len(near))
        coding = self._coding(step)
        ups = self._codecs(coding.up, bounds, 0)
        update = self._encoded(peer, lo, hi, bounds, ups, coding)
        lost = self.trouble.loses(self._seed(), peer)
        if coding.beta:
            worker.memory_F.copy_(settle(update, [not lost] * len(bounds), ups))
        anchor = self._anchor_index(peer)
        if not lost:
            self._apply(InFlightFragment(0, lo, hi, step - 1, step, {}, {anchor: decoded(update, bounds, ups)}))
        self.traffic.alone(peer, near, [len(wire) for wire in update.wires], 4 * self.layout.floats)
        if self.regions is not None and not lost:
            self._go_up(self.regions, anchor, step)
        worker.base_F = self.anchors[anchor].clone()
        worker.x_F.copy_(worker.base_F)
        worker.steps[0] = worker.samples[0] = 0
        self._written(InFlightFragment(0, lo, hi, step - 1, step, {}), step, [peer], [] if lost else [peer])

    def _go_up(self, regions: RegionServers, region: int, step: int, last: bool = False) -> None:
        """What a region came to goes to the server above it, if it is time."""
        if regions.came(region, self.anchors[region], step, last):
            near = [peer for peer in self.present if regions.region_of(peer) == region]
            self.traffic.above(near, self.present, 4 * self.layout.floats)

    def _land(self, step: int) -> None:
        for flight in [f for f in self.flights if f.lands_at <= step]:
            self._apply(flight)

    def _apply(self, flight: InFlightFragment, outer: Outer | None = None) -> None:
        """The outer step at every anchor, the recipe's or another one, then everybody's merge."""
        lo, hi = flight.lo, flight.hi
        inside = self._inside(lo, hi)
        before = [anchor_F[lo:hi].clone() for anchor_F in self.anchors]
        for index, combined in flight.combined.items():
            anchor_F, state = self.anchors[index], self.outers[index][flight.fragment]
            mean_anchor = flight.mean_anchor.get(index)
            near = None if mean_anchor is None else mean_anchor[:inside]
            moment = UpdateConditions(flight.begun, flight.agreement, near, flight.learned)
            inside_P = anchor_F[lo : lo + inside]
            after_P, after = move(outer or self.recipe.outer, state, inside_P, combined[:inside], moment)
            self._check_finite(after_P, flight.lands_at)
            anchor_F[lo : lo + inside] = after_P
            floats = self.layout.floats
            anchor_F[lo + inside : hi] -= combined[inside : floats - lo]  # buffers are averaged
            if hi > floats:
                moments = agreed_moments(after.momentum_P, after.second_P, combined[floats - lo :])
                after = replace(after, momentum_P=moments[0], second_P=moments[1])
            self.outers[index][flight.fragment] = after
        self.momentum_P[lo : lo + inside] = self.outers[0][flight.fragment].momentum_P
        if hi > self.layout.floats:
            due, agreed = (hi - self.layout.floats) // self.layout.parameters, self.shared()
            for peer in self.present:
                take_in(self.workers[peer].inner, agreed, due)
        for peer in [] if self.recipe.reducer.group == "one" else self.present:
            x_F = self.workers[peer].x_F[lo:hi]
            anchor_F = self._anchor_of(peer)[lo:hi]
            if self.clients is not None and peer not in flight.sent:
                x_F.copy_(anchor_F)  # it was not drawn, and has no steps of its own
                continue
            if peer not in flight.sent:  # it came while this was under way: it keeps its own steps
                x_F.add_(anchor_F - before[self._anchor_index(peer)])
                continue
            if self.recipe.merge == "swap":
                anchor_F = where_moved(before[self._anchor_index(peer)], anchor_F)
            merge(self.recipe.merge, x_F, flight.sent[peer], anchor_F)
        self.flights = [f for f in self.flights if f is not flight]

    def _steps_of(self, peer: int) -> int:
        """DyLU (2401.09135): the slow take fewer steps per round, so that all are about equally stale."""
        fastest = max(self.trouble.speed(one) for one in range(len(self.workers)))
        return max(1, int(self.recipe.schedule.inner_steps * self.trouble.speed(peer) / fastest))

    # ---- small words ---------------------------------------------------------------------------------------

    def _made_of(self, rows_GN: Tensor, lo: int, hi: int) -> Tensor:
        """What equal rows of a fragment would become, before it is encoded: whom a villain searches against."""
        rows = [(1, row_N) for row_N in rows_GN]
        made_N = made_of(self.recipe.reducer.statistic, rows, self._sizes(lo, hi), len(rows))
        return torch.zeros_like(rows_GN[0]) if made_N is None else made_N

    def _anchor_of(self, peer: int) -> Tensor:
        return self.own[peer].anchor_F if self.own else self.anchors[self._anchor_index(peer)]

    def _anchor_index(self, peer: int) -> int:
        """Which of the anchors that outer steps move it trains from: that of all, of its region, or its own."""
        if self.regions is not None:
            return self.regions.region_of(peer)
        return peer if len(self.anchors) > 1 else 0

    def _coding(self, step: int) -> UpdateCoding:
        return coding_at(self.recipe, step, self.steps)

    def _codecs(self, name: str, bounds: Bounds, lo: int) -> tuple[Codec, ...]:
        state = SharedState(self.anchors[0], self.momentum_P, torch.zeros(0, dtype=torch.int64))
        head, round = digest(self._seed()), self.first_round + self.launched - 1
        if "randk" in name:  # it draws by the name of the state, as in real rounds
            head = state_hash(state_bytes(self.shared(), self.layout))
        common = RoundInputs(round, state, head, self.layout, momentum_of(self.recipe.outer))
        return part_codecs(name, common, moved(bounds, lo))

    def _sizes(self, lo: int, hi: int) -> tuple[int, ...]:
        """How many values of lo … hi belong to each tensor."""
        if self.recipe.reducer.statistic not in ("radial", "clipped"):
            return ()
        return tensor_sizes(tensors_of(self.layout), lo, hi)

    def _weight(self, peer: int, fragment: int) -> int:
        worker = self.workers[peer]
        samples, steps = worker.samples[fragment], worker.steps[fragment]
        if self.records:
            return self.records[peer] * steps
        return weight_of(self.recipe.reducer, samples, samples * self.recipe.seq_len, steps)

    def _seed(self) -> bytes:
        return b"experiment %d %d" % (self.recipe.seed, self.launched)

    def _written(self, flight: InFlightFragment, step: int, members: list[int], counted: list[int]) -> None:
        losses = [loss for peer in members for loss in self.workers[peer].losses]
        batch = self.rhythm.recipe.batch
        self.rhythm.closed(step, members, {peer: tuple(self.workers[peer].losses) for peer in counted})
        for peer in members:
            self.workers[peer].losses = []
        if losses:
            self.train_loss = sum(losses) / len(losses)
        bytes_up, bytes_down = self.traffic.upload_bytes, self.traffic.download_bytes
        who = tuple(members), tuple(counted)
        one = SyncRecord(step, flight.fragment, *who, self.train_loss, bytes_up, bytes_down, batch)
        self.history.append(one)

    def _check_finite(self, anchor: Tensor, step: int) -> None:
        if not bool(anchor.isfinite().all()):
            raise ValueError(f"training diverged at step {step}: lower the learning rate or the outer step")

    def agreed(self) -> Tensor:
        """The model that a run of this recipe would hand out."""
        return torch.stack(self.anchors).mean(0) if self.regions is None else self.regions.anchor_F

    def shared(self) -> SharedState:
        """The state that real rounds would hold now, without what is under way."""
        recipe, turns = self.recipe, len(self.history) - len(self.flights)
        steps = recipe.schedule.begun(turns)
        samples = steps * recipe.batch * len(self.workers)
        tokens = samples * recipe.seq_len
        if self.rhythm.effort is not None:
            steps, samples, tokens = self.now, self.rhythm.dealt, self.rhythm.tokens
        outer = self.outers[0][0]
        inner = outer.inner
        moments = (self.momentum_P, outer.second_P) if inner is None else (inner.first_P, inner.second_P)
        counters_K = torch.zeros(self.layout.counters, dtype=torch.int64)
        return SharedState(self.agreed(), moments[0], counters_K, turns, steps, samples, tokens, moments[1])

    def state(self) -> Digest | None:
        """What real rounds would name it by; None where they cannot do this, or their members never agree."""
        recipe, trouble = self.recipe, self.trouble
        ours = self.clients is not None or recipe.schedule.epochs is not UNSET  # rounds of data of one's own
        ours |= bool(self.records)  # those of real runs move
        apart = ours or self.own_data or self.layout.counters
        schedule = recipe.schedule
        whole = self.steps % schedule.turn_steps == 0 if self.rhythm.effort is None else self.rhythm.whole
        whole &= not schedule.phases or self.steps == schedule.steps
        if apart or swarm_problem(recipe) or trouble != FaultSpec() or not whole:
            return None
        return state_hash(state_bytes(self.shared(), self.layout))

    @torch.no_grad()
    def loss_at(self, x_F: Tensor, samples: int) -> float:
        viewer = self.viewer
        viewer.x_F.copy_(x_F)
        viewer.model.eval()
        found = validation(self.held_out, samples, 256, self.recipe.seq_len)
        losses = [(float(self.loss(viewer.model, one)), len(one[0])) for one in found]
        return sum(loss * size for loss, size in losses) / sum(size for _, size in losses)
