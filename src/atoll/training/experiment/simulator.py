"""In-process simulation of a run: members train, send, receive and merge as real ones do, one after the other.

It also plays absent, late, slow and Byzantine members, client sampling and members with anchors of their own.

Invariants:
- Equal arguments give equal bits.
- Bytes are counted when they are sent (`traffic`).
Not responsible for: sockets, clocks, checks of its arguments (`api` checks them).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from msgspec import UNSET
from torch import Tensor, nn

from atoll.base.draw import draw_pairs
from atoll.base.ids import Digest
from atoll.crypto.digest import digest
from atoll.training.codec import Codec
from atoll.training.data import Data, epoch_samples, validation
from atoll.training.exchange.combine import gather
from atoll.training.exchange.layout import flatten, layout_of
from atoll.training.experiment.adversaries import decoded, forge_updates, is_readable
from atoll.training.experiment.anchors import AnchorSet, InFlightFragment
from atoll.training.experiment.client_draw import ClientSampler
from atoll.training.experiment.faults import FaultSpec
from atoll.training.experiment.member import SimulatedMember
from atoll.training.experiment.options import ExperimentOptions
from atoll.training.experiment.results import ExperimentResult, SyncRecord
from atoll.training.experiment.round_clock import RoundSchedule
from atoll.training.experiment.traffic import TrafficCounter
from atoll.training.recipe.error_feedback import (
    FEEDBACK_DTYPES,
    EncodedUpdate,
    encode_update,
    settle_error_feedback,
)
from atoll.training.recipe.gradient import ComputeOptions, Loss
from atoll.training.recipe.inner import PipelinedGradients
from atoll.training.recipe.merge import merge, where_moved
from atoll.training.recipe.methods import method_of
from atoll.training.recipe.moments import adopt_moments, joiner_state
from atoll.training.recipe.outer import PLAIN, AgreementNesterov, MomentAverage, Outer, momentum_of
from atoll.training.recipe.recipes import Recipe, UpdateCoding, closing_recipe, coding_at_step, swarm_problem
from atoll.training.recipe.reducer import agreement, answered, arrived, made_of, reduced, weight_of
from atoll.training.recipe.schedule import fragments_of, moments_due, phase_at
from atoll.training.recipe.state import SharedState, state_bytes, state_hash
from atoll.training.recipe.update import (
    Bounds,
    RoundCodingInputs,
    moved,
    part_bounds,
    part_codecs,
    tensor_sizes,
    tensors_of,
)


class ExperimentSimulator:
    """A run of a recipe in one process; its state can be read between steps."""

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        data: Data | list[Data],
        peers: int,
        steps: int,
        trouble: FaultSpec,
        loss: Loss | None = None,
        *,
        options: ExperimentOptions | None = None,
    ) -> None:
        """`loss` replaces that of the options. `data` as a list: one data set per member, else all share it."""
        options = options or ExperimentOptions()
        self.recipe, self.steps, self.trouble, self.loss = recipe, steps, trouble, loss or options.loss
        self.order = range(peers) if options.order is None else options.order
        self.round_clock = RoundSchedule(recipe, steps, peers, options.effort, trouble)
        self.own_data = isinstance(data, list)
        # (data set, shard, shards) of each member
        self.shares = (
            [(one, 0, 1) for one in data] if isinstance(data, list) else [(data, w, peers) for w in range(peers)]
        )
        self.layout = layout_of(model, options.only)
        self.fragments = fragments_of(self.layout, recipe.schedule.fragments)
        how = recipe.computing or ComputeOptions(), self.loss
        self.workers = [SimulatedMember(model, len(self.fragments), self.layout, *how) for _ in range(peers)]
        for worker in self.workers:
            worker.memory_F = worker.memory_F.to(FEEDBACK_DTYPES[options.feedback_precision])
        self.viewer = SimulatedMember(model, 0, self.layout)  # model for validation, never trained
        self.present = list(range(peers))
        self.clients = None if options.sample is None else ClientSampler(peers, options.sample, options.groups)
        self.records = tuple(options.records)  # weight of each peer's row per step; empty: by samples
        first_F, _ = flatten(model, self.layout)
        self.anchor_set = AnchorSet(recipe, self.layout, self.fragments, first_F, peers)
        self.owed: dict[int, Tensor] = {}  # owner -> error feedback of its results, over the whole vector
        self.flights: list[InFlightFragment] = []
        self.traffic = TrafficCounter(peers)
        self.history: list[SyncRecord] = []
        self.launched = 0  # rounds begun
        self.first_round = 0  # number of its first round; a real run has earlier ones without training
        self.now = 0  # steps done
        self.live_F = first_F  # mean of live parameters before the last round

    @property
    def anchors(self) -> list[Tensor]:
        return self.anchor_set.anchors

    @property
    def momentum_P(self) -> Tensor:
        return self.anchor_set.momentum_P

    @property
    def held_out(self) -> Data:
        """The data set that validates the model: the first member's."""
        return self.shares[0][0]

    # ---- steps of the run ----------------------------------------------------------------------------------

    def run_to_end(
        self, evaluate_every: int, samples: int, progress: Callable[[SyncRecord], object] | None
    ) -> ExperimentResult:
        """Run to the end. `evaluate_every` steps (0: only at the end), `samples` validation samples are used."""
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
            method=method_of(self.recipe),
        )

    def step(self) -> list[SyncRecord]:
        """Take one step of the run; returns the records of the rounds that ended with it."""
        self.now += 1
        known = len(self.history)
        self._update_presence(self.now)
        if self.clients is not None:
            self.clients.draw(self._seed(), self.present, self.launched)
        rhythm = self.round_clock
        rhythm.begin_round(self._trainees())
        for peer in self._trainees():
            if rhythm.takes_step(peer, self.now) and not self._has_passed_data(peer):
                worker = self.workers[peer]
                worker.cursor = rhythm.cursor_of(peer, worker.cursor)
                worker.train(rhythm.recipe, self.shares[peer], rhythm.rate_step(self.now - 1))
                rhythm.count_step(peer)
        if self.now == self.steps:
            self._close()
        else:
            for flight in [f for f in self.flights if f.lands_at <= self.now]:
                self._apply(flight)
            self._synchronize(self.now)
        return self.history[known:]

    def _trainees(self) -> list[int]:
        """The present members that train in the round in progress."""
        return self.present if self.clients is None else [p for p in self.clients.drawn if p in self.present]

    def _has_passed_data(self, peer: int) -> bool:
        """Whether the member has made its passes over its data in this round."""
        schedule, (data, _, shares) = self.recipe.schedule, self.shares[peer]
        if schedule.epochs is UNSET:
            return False
        samples = epoch_samples(data, self.recipe.seq_len)
        return self.workers[peer].steps[0] >= schedule.steps_of(
            -(-samples // (shares * self.round_clock.recipe.batch))
        )

    def _update_presence(self, step: int) -> None:
        """Update the present members; returning ones restart from a current anchor."""
        present = [p for p in range(len(self.workers)) if not self.trouble.is_away(p, step)]
        for peer in present:
            if peer not in self.present:
                self.anchor_set.rejoin(peer, self.present, self.recipe.paired)
                moments = isinstance(self.recipe.outer, MomentAverage)
                self.workers[peer].restart(self._anchor_of(peer), joiner_state(self.shared()) if moments else None)
                self.round_clock.drop_samples(peer)
        self.present = present

    def _synchronize(self, step: int) -> None:
        """Begin the rounds that are due after this step, and apply those that do not overlap."""
        reducer = self.recipe.reducer
        if reducer.group == "one":
            for peer in self.present:
                self._exchange_single(peer, step)
            if step == self.steps and self.anchor_set.regions is not None:
                for region in range(len(self.anchors)):
                    self._send_up(region, step, last=True)
            return
        for fragment in self.round_clock.due(step):
            if not isinstance(self.recipe.inner, PipelinedGradients):
                for old in [f for f in self.flights if f.fragment == fragment]:
                    self._apply(old)
            flight = self._launch(fragment, step, self._coding(step), self._range_of(fragment))
            if flight is None:
                continue
            if flight.lands_at <= step:
                self._apply(flight)
            else:
                self.flights.append(flight)

    def _range_of(self, fragment: int) -> tuple[int, int]:
        """[lo, hi) that the fragment's round carries, with moments behind it if they are due."""
        lo, hi = self.fragments[fragment]
        return lo, hi + moments_due(self.recipe.schedule, len(self.history)) * self.layout.parameters

    def _close(self) -> None:
        """End the run: apply all fragments in flight, then hold the last round."""
        schedule = self.recipe.schedule
        for flight in list(self.flights):
            self._apply(flight)
        self.live_F = torch.stack([self.workers[peer].x_F for peer in self._trainees() or [0]]).mean(0)
        if schedule.closing:
            last = closing_recipe(self.recipe)
            self._close_all(last.coding, last.outer)
        elif len(self.fragments) > 1:
            self._close_all(self._coding(self.steps), self.recipe.outer)
        else:
            self._synchronize(self.steps)

    def _close_all(self, coding: UpdateCoding, outer: Outer) -> None:
        """The last round, which carries all fragments at once, as in real rounds."""
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
        """Hold the round of a fragment, or of `span`: trainees encode and send, all present members own parts.

        None if too few members train.
        """
        lo, hi = span or self.fragments[fragment]
        owners, members, reducer = list(self.present), list(self._trainees()), self.recipe.reducer
        if len(members) < max(1, reducer.peers_min):
            if self.clients is not None:
                self.clients.discard()
            return None
        self.launched += 1
        paired = reducer.group == "pair"
        bounds = part_bounds(hi - lo, (1,) * (1 if reducer.group in ("pair", "server") else len(owners)))
        ups = self._codecs(coding.up, bounds, lo)
        updates = {peer: self._encoded(peer, lo, hi, bounds, ups, coding) for peer in members}
        villains = {peer: name for peer, name in self.trouble.byzantine.items() if peer in updates}
        if villains:
            updates |= forge_updates(
                updates, villains, bounds, ups, lambda rows_GN: self._aggregate(rows_GN, lo, hi)
            )
        in_time, closes = arrived(reducer, [self.trouble.lateness(p) for p in members], self.recipe.hidden_steps)
        counted = [
            p
            for p, fine in zip(members, in_time, strict=True)
            if fine and not self.trouble.is_lost(self._seed(), p)
        ]
        counted = [p for p in counted if p not in villains or is_readable(updates[p], bounds, ups)]
        waits = self.recipe.hidden_steps == 0 or step == self.steps
        _, phase = phase_at(self.recipe.schedule, step, self.steps)
        begun = self.round_clock.outer_step(max(0, step - phase.inner_steps // len(self.fragments)))
        flight = InFlightFragment(fragment, lo, hi, begun, step if waits else step + closes, {})
        for peer in members:
            flight.sent[peer] = self.workers[peer].x_F[lo:hi].clone()
            if coding.beta and peer not in villains:  # a forged update leaves no error to correct
                kept = settle_error_feedback(updates[peer], [peer in counted] * len(bounds), ups)
                self.workers[peer].memory_F[lo:hi] = kept
        if paired:
            self._exchange_pairs(flight, members, counted, updates, ups)
        else:
            rows = [p for p in self.order if p in counted]
            self._reduce(flight, owners, rows, updates, bounds, ups, coding)
        if counted and self.anchor_set.local:
            self._move_local_anchors(flight, {p: decoded(u, bounds, ups) for p, u in updates.items()})
        if not counted and not paired:
            flight.combined.clear()  # the model stays
        if self.clients is not None:
            self.clients.charge(counted)
        self._record(flight, step, members, counted)
        return flight

    def _move_local_anchors(self, flight: InFlightFragment, rows: dict[int, Tensor]) -> None:
        """Apply the members' own rows and the mean to their local anchors (eager updates)."""
        outer = self.recipe.outer
        for peer, own in enumerate(self.anchor_set.local):
            assert isinstance(outer, PLAIN), "check_recipe refuses the others"
            if peer in rows:
                own.apply_own_share(outer, rows[peer], len(rows), flight.begun)
                own.apply_mean(outer, flight.combined[0], flight.begun)

    def _encoded(
        self, peer: int, lo: int, hi: int, bounds: Bounds, ups: tuple[Codec, ...], coding: UpdateCoding
    ) -> EncodedUpdate:
        """One member's update of lo … hi, encoded under its error feedback."""
        worker = self.workers[peer]
        begin, end = worker.progress(self.recipe.inner, self._anchor_of(peer), lo, hi)
        memory = worker.memory_F[lo:hi] if coding.beta else None
        return encode_update(begin, end, memory, bounds, ups, coding.beta, worker.memory_F.new_empty)

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
        """Reduce every part at its owner, as in a real round. Rows are added up in the order of `counted`."""
        reducer, n = self.recipe.reducer, flight.hi - flight.lo
        combined = torch.zeros(n, dtype=torch.float32)
        agreed = torch.ones(n, dtype=torch.float32) if isinstance(self.recipe.outer, AgreementNesterov) else None
        gathered = coding.answer == "gathered"
        downs = [None] * len(bounds) if gathered else self._codecs(coding.down, bounds, flight.lo)
        weights = {p: self._weight(p, flight.fragment) for p in counted}
        robust, whole_N = reducer.statistic == "robust", None
        if robust:  # owners add up the Gram matrices of their parts, so each has the distances of whole rows
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
                owner_state = owed_N, remember
                done = reduced(reducer, rows, b - a, up, down, *owner_state, sizes=sizes, members=len(updates))
            if remember and done.memory_N is not None:
                owed_F = self.owed.setdefault(owner, torch.zeros(self.layout.floats, dtype=torch.float32))
                owed_F[here] = done.memory_N
            if done.value_N is not None:
                combined[a:b] = done.value_N
            if agreed is not None and len(rows) > 1:
                agreed[a:b] = agreement(rows, b - a, up)
            row_bytes = {p: len(updates[p].wires[part]) if p in updates else 0 for p in owners}
            extra = 4 if agreed is not None else 0
            if robust:
                extra += 8 * (len(rows) + 1) ** 2  # the part's Gram matrix, to every other owner
            self.traffic.count_part(owner, row_bytes, counted, None if gathered else done.sent_bytes + extra)
        flight.combined[0] = combined
        samples = sum(self.workers[p].samples[flight.fragment] for p in counted)
        flight.learned = samples * self.recipe.seq_len
        if agreed is not None:
            flight.agreement = agreed[: self.anchor_set.parameters_in(flight.lo, flight.hi)]
        for peer in updates:
            worker = self.workers[peer]
            worker.steps[flight.fragment] = worker.samples[flight.fragment] = 0

    def _exchange_pairs(
        self,
        flight: InFlightFragment,
        members: list[int],
        counted: list[int],
        updates: dict[int, EncodedUpdate],
        ups: tuple[Codec, ...],
    ) -> None:
        """Average in pairs; the members of a pair also exchange their anchors, in fp32."""
        lo, hi = flight.lo, flight.hi
        for pair in draw_pairs(self.launched - 1, members):
            here = [p for p in pair if p in counted]
            for peer in pair:
                known = here if peer in here else [peer, *here]  # a peer always has its own row
                rows = [(1, updates[p].wires[0]) for p in sorted(known)]
                mean_N = gather(rows, hi - lo, ups[0]).mean_N
                assert mean_N is not None
                flight.combined[peer] = mean_N
                anchors = [self.anchors[p][lo:hi] for p in sorted(known)]
                flight.mean_anchor[peer] = torch.stack(anchors).mean(0)
                if len(pair) == 2:
                    self.traffic.count_pair(
                        peer, pair, len(updates[peer].wires[0]) + 4 * (hi - lo), peer in counted
                    )

    def _exchange_single(self, peer: int, step: int) -> None:
        """One member's own round with the owners of the parts; no other member takes part or waits."""
        worker, lo, hi = self.workers[peer], 0, self.layout.floats
        wanted = self._steps_of(peer)
        offset = wanted * peer // len(self.workers)  # not all in the same step
        if step < self.steps and (
            worker.steps[0] == 0 or (worker.steps[0] + offset * (worker.base_F is None)) < wanted
        ):
            return
        self.launched += 1
        anchor = self.anchor_set.index_of(peer)
        near = [p for p in self.present if self.anchor_set.index_of(p) == anchor]
        bounds = part_bounds(hi, (1,) * len(near))
        coding = self._coding(step)
        ups = self._codecs(coding.up, bounds, 0)
        update = self._encoded(peer, lo, hi, bounds, ups, coding)
        lost = self.trouble.is_lost(self._seed(), peer)
        if coding.beta:
            worker.memory_F.copy_(settle_error_feedback(update, [not lost] * len(bounds), ups))
        if not lost:
            self._apply(InFlightFragment(0, lo, hi, step - 1, step, {}, {anchor: decoded(update, bounds, ups)}))
        self.traffic.count_single(peer, near, [len(wire) for wire in update.wires], 4 * self.layout.floats)
        if not lost:
            self._send_up(anchor, step)
        worker.base_F = self.anchors[anchor].clone()
        worker.x_F.copy_(worker.base_F)
        worker.steps[0] = worker.samples[0] = 0
        self._record(InFlightFragment(0, lo, hi, step - 1, step, {}), step, [peer], [] if lost else [peer])

    def _send_up(self, region: int, step: int, last: bool = False) -> None:
        """Synchronize a region with the upper server if it is due."""
        regions = self.anchor_set.regions
        if regions is not None and regions.add_update(region, self.anchors[region], step, last):
            near = [peer for peer in self.present if regions.region_of(peer) == region]
            self.traffic.count_region(near, self.present, 4 * self.layout.floats)

    def _apply(self, flight: InFlightFragment, outer: Outer | None = None) -> None:
        """Take the outer step at every anchor (`outer` or the recipe's), then merge it into every member."""
        before = self.anchor_set.take_outer_step(flight, outer or self.recipe.outer)
        if flight.hi > self.layout.floats:
            due, agreed = (flight.hi - self.layout.floats) // self.layout.parameters, self.shared()
            for peer in self.present:
                adopt_moments(self.workers[peer].inner, agreed, due)
        for peer in [] if self.recipe.reducer.group == "one" else self.present:
            self._merge(peer, flight, before[self.anchor_set.index_of(peer)])
        self.flights = [f for f in self.flights if f is not flight]

    def _merge(self, peer: int, flight: InFlightFragment, before_N: Tensor) -> None:
        """Merge the moved anchor, `before_N` before the step, into one member's live parameters."""
        x_N = self.workers[peer].x_F[flight.lo : flight.hi]
        anchor_N = self._anchor_of(peer)[flight.lo : flight.hi]
        if peer in flight.sent:
            moved_N = where_moved(before_N, anchor_N) if self.recipe.merge == "swap" else anchor_N
            merge(self.recipe.merge, x_N, flight.sent[peer], moved_N)
        elif self.clients is not None:
            x_N.copy_(anchor_N)  # it was not drawn, and has no steps of its own
        else:
            x_N.add_(anchor_N - before_N)  # it came back during the flight, and keeps its own steps

    def _steps_of(self, peer: int) -> int:
        """DyLU (2401.09135): slow members take fewer steps per round, so all updates are about equally stale."""
        fastest = max(self.trouble.speed(one) for one in range(len(self.workers)))
        return max(1, int(self.recipe.schedule.inner_steps * self.trouble.speed(peer) / fastest))

    # ---- parts of a round ----------------------------------------------------------------------------------

    def _aggregate(self, rows_GN: Tensor, lo: int, hi: int) -> Tensor:
        """The owners' statistic of equally weighted rows of a fragment: the target of forged updates."""
        rows = [(1, row_N) for row_N in rows_GN]
        made_N = made_of(self.recipe.reducer.statistic, rows, self._sizes(lo, hi), len(rows))
        return torch.zeros_like(rows_GN[0]) if made_N is None else made_N

    def _anchor_of(self, peer: int) -> Tensor:
        return self.anchor_set.anchor_of(peer)

    def _coding(self, step: int) -> UpdateCoding:
        return coding_at_step(self.recipe, step, self.steps)

    def _codecs(self, name: str, bounds: Bounds, lo: int) -> tuple[Codec, ...]:
        state = SharedState(self.anchors[0], self.momentum_P, torch.zeros(0, dtype=torch.int64))
        head, round = digest(self._seed()), self.first_round + self.launched - 1
        if "randk" in name:  # it draws by the state hash, as in real rounds
            head = state_hash(state_bytes(self.shared(), self.layout))
        common = RoundCodingInputs(round, state, head, self.layout, momentum_of(self.recipe.outer))
        return part_codecs(name, common, moved(bounds, lo))

    def _sizes(self, lo: int, hi: int) -> tuple[int, ...]:
        """Number of values of lo … hi in each tensor, for statistics that need it."""
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

    def _record(self, flight: InFlightFragment, step: int, members: list[int], counted: list[int]) -> None:
        losses = [loss for peer in members for loss in self.workers[peer].losses]
        batch = self.round_clock.recipe.batch
        self.round_clock.end_round(step, members, {peer: tuple(self.workers[peer].losses) for peer in counted})
        for peer in members:
            self.workers[peer].losses = []
        known = self.history[-1].train_loss if self.history else float("nan")
        loss = sum(losses) / len(losses) if losses else known
        bytes_up, bytes_down = self.traffic.upload_bytes, self.traffic.download_bytes
        who = tuple(members), tuple(counted)
        self.history.append(SyncRecord(step, flight.fragment, *who, loss, bytes_up, bytes_down, batch))

    # ---- results -------------------------------------------------------------------------------------------

    def agreed(self) -> Tensor:
        """The model that a run of this recipe would export."""
        return self.anchor_set.agreed()

    def shared(self) -> SharedState:
        """The shared state of a real run at this step, without fragments in flight."""
        recipe, turns = self.recipe, len(self.history) - len(self.flights)
        steps = recipe.schedule.begun(turns)
        samples = steps * recipe.batch * len(self.workers)
        tokens = samples * recipe.seq_len
        if self.round_clock.effort is not None:
            steps, samples, tokens = self.now, self.round_clock.dealt, self.round_clock.tokens
        outer = self.anchor_set.outers[0][0]
        inner = outer.inner
        moments = (self.momentum_P, outer.second_P) if inner is None else (inner.first_P, inner.second_P)
        counters_K = torch.zeros(self.layout.counters, dtype=torch.int64)
        return SharedState(self.agreed(), moments[0], counters_K, turns, steps, samples, tokens, moments[1])

    def state(self) -> Digest | None:
        """State hash of the same real run; None if real runs cannot do this, or members never agree."""
        recipe, schedule = self.recipe, self.recipe.schedule
        private = self.own_data or self.clients is not None or schedule.epochs is not UNSET  # data of members' own
        differs = private or bool(self.records) or self.layout.counters  # records of real runs change
        whole = self.steps % schedule.turn_steps == 0 if self.round_clock.effort is None else self.round_clock.whole
        whole &= not schedule.phases or self.steps == schedule.steps
        if differs or swarm_problem(recipe) or self.trouble != FaultSpec() or not whole:
            return None
        return state_hash(state_bytes(self.shared(), self.layout))

    @torch.no_grad()
    def loss_at(self, x_F: Tensor, samples: int) -> float:
        """Mean validation loss of a parameter vector (F,)."""
        viewer = self.viewer
        viewer.x_F.copy_(x_F)
        viewer.model.eval()
        found = validation(self.held_out, samples, 256, self.recipe.seq_len)
        losses = [(float(self.loss(viewer.model, one)), len(one[0])) for one in found]
        return sum(loss * size for loss, size in losses) / sum(size for _, size in losses)
