"""Run view: what a peer knows once it has genesis, derived from accepted vertices alone.

    history     agreed vertices                     roster    members and connections
    pool        reports for the next vertex         forks     other branches of the run
    eras        long-lived signatures               pieces    holders of pieces of older states

Invariants:
- All of them accept a vertex, or none does.
Not responsible for: starting rounds, fetching states; the peer does both when the history grows.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import NamedTuple

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import Effect, Persist, Send
from atoll.crypto.digest import digest
from atoll.crypto.signer import IdentitySigner
from atoll.peer.capabilities import PeerPlugins
from atoll.peer.events import MembershipChanged
from atoll.peer.governance.orders import authority_of
from atoll.peer.governance.settings_change import plan_after, settings_after
from atoll.peer.membership.admission import DesiredRole
from atoll.peer.membership.report_pool import ReportPool
from atoll.peer.membership.roster import MemberRoster, change_of, identities_in
from atoll.peer.round.context import RoundContext, context_after
from atoll.peer.settings import settings_of_run
from atoll.peer.sync.history_repair import HistoryRepair
from atoll.peer.sync.state_archive import DistributedStateArchive
from atoll.peer.verify.registry import ledgers_of
from atoll.protocol.agreement.interface import ConsensusEngine, make_engine
from atoll.protocol.agreement.voter import Electorate
from atoll.protocol.history.chain import VertexChain, find_missing_vertex
from atoll.protocol.history.era_signatures import EraSignatureTracker
from atoll.wire.codec import decode_body, decode_vertex, encode
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.history import EraSignatures, VerticesRequest
from atoll.wire.messages.vertex import Vertex, VertexBody


class HistoryExtended(NamedTuple):
    """The history has one more vertex."""

    body: VertexBody
    effects: list[Effect]
    change: MembershipChanged | None  # None if the membership is unchanged


class RunView:
    """`gone`: unreachable peers. `linked` and `identities` belong to the peer and outlive this view."""

    def __init__(
        self,
        genesis: Vertex,
        capabilities: PeerPlugins,
        notary: StatementSigner,
        wish: DesiredRole,
        vouch: IdentitySigner | None,
        linked: Set[PeerId],
        identities: dict[PeerId, bytes],
        gone: Callable[[PeerId], bool],
    ) -> None:
        self.settings = settings = settings_of_run(decode_body(genesis.body))
        self.notary, self.identities, self.linked, self.gone = notary, identities, linked, gone
        self.history = history = VertexChain(
            genesis, notary, self._voters_of, authority_of(settings, notary.verifier)
        )
        self.roster = MemberRoster(notary.me, history, wish.role == "client")
        ledgers = ledgers_of(capabilities.verifiers, settings)
        self.pool = ReportPool(notary, history, settings, ledgers)
        self.forks = capabilities.forks(notary.me, history, linked)
        self.eras: EraSignatureTracker | None = None  # None if the run has no eras
        if every := settings.era_rounds:
            demands = wish.role != "visitor"  # a visitor checks existing signatures and demands none
            self.eras = EraSignatureTracker(history, every, self._rounds_after, notary.verifier, vouch, demands)
        self.pieces: DistributedStateArchive | None = None  # None if older states are stored whole
        if (coded := settings.kept_coded) and capabilities.archive is not None:
            self.pieces = capabilities.archive(notary.me, coded, history, ledgers, self.unheard)
        known = {digest(identity): identity for identity in history.authority.identities}
        identities |= {m.peer: known[m.identity] for m in history.head_body.members if m.identity in known}

    def _voters_of(self, head: Digest, body: VertexBody) -> tuple[dict[PeerId, bytes], int]:
        plan = plan_after(self.settings, head, body)
        return plan.vote_keys, plan.quorum

    def _rounds_after(self, body: VertexBody) -> int:
        return settings_after(self.settings, body).rounds

    def mending(self, kept: dict[str, bytes]) -> HistoryRepair | None:
        """The repair job for a hole in the stored history; until it ends only the newest vertex is known.

        None if whole.
        """
        if (hole := find_missing_vertex(kept, self.notary.run)) is None:
            return None
        assert hole.id is not None, f"nothing names the vertex of round {hole.round}; no peer starts there"
        newest = max(int(name.split("/")[1]) for name in kept if name.startswith("vertex/"))
        self.history.restore(decode_vertex(kept[f"vertex/{newest}"]))
        return HistoryRepair(self.history, kept, hole)

    def restore(self, kept: dict[str, bytes]) -> list[Effect]:
        """Restore what was persisted before a restart."""
        rounds = sorted(int(name.split("/")[1]) for name in kept if name.startswith("vertex/"))
        for round in rounds:
            if round in (self.history.head + 1, rounds[0]):
                self.history.restore(decode_vertex(kept[f"vertex/{round}"]))
        self.forks.restore(kept)
        effects = self.eras.restore(kept) if self.eras is not None else []
        return effects + (self._restore_pieces(self.pieces, kept) if self.pieces is not None else [])

    def _restore_pieces(self, pieces: DistributedStateArchive, kept: dict[str, bytes]) -> list[Effect]:
        pieces.restore(kept)
        self.pool.recent()  # the ledger catches up with what the book lacks
        return pieces.begin()

    # ---- one vertex more ---------------------------------------------------------------------------------

    def learn(self, vertex: Vertex, who: PeerId, handed: bool) -> HistoryExtended | list[Effect]:
        """Accept this vertex if it is the next one and its certificate holds; otherwise effects about it.

        `handed`: received while catching up, long after the fact. Raises PeerFault if it is forged.
        """
        before = self.history.head_body
        try:
            body = self.history.append(vertex, who)
        except PeerFault:
            if (parted := self.forks.answer_other_branch(vertex, who)) is not None:
                return parted
            raise
        if body is None:
            return self.forks.check_past_vertex(vertex, who, self.roster.within_reach())
        self.pool.settle(body)
        effects: list[Effect] = [Persist(f"vertex/{body.round}", encode(vertex))]
        effects += self.pieces.on_vertex() if self.pieces is not None else []
        effects += self._learn_identities(body)
        effects += self._end_era(self.eras, body, handed) if self.eras is not None else []
        return HistoryExtended(body, effects, change_of(before.members, body.members))

    def _learn_identities(self, body: VertexBody) -> list[Effect]:
        """Store the public identities of members that joined in this round, for handshakes."""
        found = identities_in(body, self.notary.verifier)
        self.identities.update(found)
        return [Persist(f"identity/{peer}", public) for peer, public in found.items()]

    def _end_era(self, eras: EraSignatureTracker, body: VertexBody, handed: bool) -> list[Effect]:
        """If an era ends with this vertex, sign it while keys last; no peer waits for that."""
        ended = eras.on_vertex(body, handed)
        if not ended:
            return []
        reach = self.roster.within_reach()
        return ended + eras.send_own(body.round, reach) + eras.request_from_leavers(body.round, reach)

    # ---- the round that comes next -----------------------------------------------------------------------

    def ground_after(self, head: Digest, parent: VertexBody, run_time: Seconds) -> RoundContext:
        """The context of the round after this vertex."""
        plan = plan_after(self.settings, head, parent).set_right(run_time)
        return context_after(self.settings, plan, parent, self.pool.recent(), self.notary.run)

    def open_agreement(self, ground: RoundContext, kept: bytes | None) -> ConsensusEngine:
        """The agreement on that round's vertex; `kept` is its durable state from before a restart."""
        plan, raft = ground.plan, self.settings.by_raft
        turns = plan.turns(ground.parent.proposer if raft else None)
        electorate = Electorate(plan.round, plan.trace, plan.vote_keys, plan.quorum, turns)
        return make_engine(raft, self.notary, electorate, kept)

    # ---- signatures under eras ---------------------------------------------------------------------------

    @property
    def awaits_signatures(self) -> bool:
        """True if an ended era lacks signatures that it should have by now; no later vertex is accepted then."""
        return self.eras is not None and self.eras.blocking_era(self.history.head + 1) is not None

    def demand_signatures(self, sender: PeerId, now: Seconds) -> list[Effect]:
        """Request these signatures from a peer that sends more vertices."""
        return self.eras.request_blocking(sender, self.history.head + 1, now) if self.eras is not None else []

    def hear_era(self, sender: PeerId, said: EraSignatures, now: Seconds) -> list[Effect]:
        """Take era signatures; if they were missing, request the rest of the history."""
        if self.eras is None:
            return []
        before, effects = self.awaits_signatures, self.eras.receive_signatures(sender, said, now)
        if before and not self.awaits_signatures:
            effects += [Send(sender, VerticesRequest(self.history.head + 1))]
        return effects

    def vouch_for_eras(self, sign: Callable[[bytes], bytes]) -> list[Effect]:
        """The recovery identity's signatures under eras that will get no quorum."""
        return self.eras.attest_unsigned(sign, self.roster.within_reach()) if self.eras is not None else []

    # ---- what follows ------------------------------------------------------------------------------------

    def unheard(self, peer: PeerId) -> bool:
        """True if the peer is no present member or is silent, so that others are asked first."""
        return self.roster.standing_of(peer) in (None, "away", "expelled") or self.gone(peer)

    def mute(self, peer: PeerId) -> bool:
        """True if the peer is gone, or rejoins with another key, so that its messages do not count in this
        round.
        """
        return self.gone(peer) or self._asks_anew(peer)

    def rekeyed(self) -> set[PeerId]:
        """Members that ask for another key than the membership holds."""
        return {m.peer for m in self.roster.members if self._asks_anew(m.peer)}

    def _asks_anew(self, peer: PeerId) -> bool:
        asked, members = self.pool.join_of(peer), self.roster.members
        return asked is not None and any(m.peer == peer and m.vote_key != asked.vote_key for m in members)
