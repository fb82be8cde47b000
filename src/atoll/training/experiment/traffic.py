"""Traffic counters of an experiment: bytes sent and received per peer, copy by copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class TrafficCounter:
    def __init__(self, peers: int) -> None:
        self.sent, self.received = [0] * peers, [0] * peers

    @property
    def upload_bytes(self) -> float:
        return sum(self.sent) / len(self.sent)

    @property
    def download_bytes(self) -> float:
        return sum(self.received) / len(self.received)

    def count_part(self, owner: int, rows: Mapping[int, int], arrived: Sequence[int], result: int | None) -> None:
        """One part of one round: rows to its owner and its result to all members, or (None) rows to all members.

        A lost row counts as sent.
        """
        for peer, size in rows.items():
            others = [owner] if result is not None else list(rows)
            for other in others:
                if other != peer:
                    self._carry(peer, other, size, peer in arrived)
        if result:
            for peer in rows:
                if peer != owner:
                    self._carry(owner, peer, result)

    def count_pair(self, peer: int, pair: Sequence[int], size: int, arrives: bool) -> None:
        """One peer's row and anchor to its partner."""
        for other in pair:
            if other != peer:
                self._carry(peer, other, size, arrives)

    def count_single(self, peer: int, members: Sequence[int], rows: Sequence[int], anchor_bytes: int) -> None:
        """One peer's own exchange with the owners of all parts: its rows go out, the new anchor comes back."""
        for part, size in enumerate(rows):
            owner = members[part % len(members)]
            if owner != peer:
                self._carry(peer, owner, size)
                self._carry(owner, peer, anchor_bytes // len(rows))

    def count_region(self, region: Sequence[int], members: Sequence[int], size: int) -> None:
        """A region's vector to the upper server and that server's back, with a part at each of `members`."""
        beyond = size * (len(members) - 1) // len(members)
        for peers in filter(None, (region, members)):
            for peer in peers:
                self.sent[peer] += beyond // len(peers)
                self.received[peer] += beyond // len(peers)

    def ratios(self, parameters: int, steps: int) -> tuple[float | None, float | None]:
        """(upload, download): reduction factors against ring data parallelism in fp32; None if no byte is sent."""
        peers = len(self.sent)
        ring = 2 * (peers - 1) / peers * 4 * parameters * steps
        up, down = self.upload_bytes, self.download_bytes
        return (ring / up if up else None), (ring / down if down else None)

    def _carry(self, sender: int, receiver: int, size: int, arrives: bool = True) -> None:
        self.sent[sender] += size
        self.received[receiver] += size if arrives else 0
