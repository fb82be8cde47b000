"""Traffic counters of an experiment: bytes sent and received per peer, copy by copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class TrafficCounter:
    def __init__(self, peers: int) -> None:
        self.sent, self.heard = [0] * peers, [0] * peers

    @property
    def upload_bytes(self) -> float:
        return sum(self.sent) / len(self.sent)

    @property
    def download_bytes(self) -> float:
        return sum(self.heard) / len(self.heard)

    def part(self, owner: int, says: Mapping[int, int], arrived: Sequence[int], answer: int | None) -> None:
        """One part of one round: rows to its owner and its answer to all, or (None) rows to everybody.

        A row that is lost was sent all the same.
        """
        for peer, size in says.items():
            others = [owner] if answer is not None else list(says)
            for other in others:
                if other != peer:
                    self._carry(peer, other, size, peer in arrived)
        if answer:
            for peer in says:
                if peer != owner:
                    self._carry(owner, peer, answer)

    def pair(self, peer: int, pair: Sequence[int], size: int, arrives: bool) -> None:
        for other in pair:
            if other != peer:
                self._carry(peer, other, size, arrives)

    def alone(self, peer: int, members: Sequence[int], rows: Sequence[int], answer: int) -> None:
        """One peer with the owners of all parts: its rows go out, the new anchor comes back."""
        for part, size in enumerate(rows):
            owner = members[part % len(members)]
            if owner != peer:
                self._carry(peer, owner, size)
                self._carry(owner, peer, answer // len(rows))

    def above(self, region: Sequence[int], members: Sequence[int], size: int) -> None:
        """A region's vector to the server of all regions and that one's back, a part at each of `members`."""
        beyond = size * (len(members) - 1) // len(members)
        for peers in filter(None, (region, members)):
            for peer in peers:
                self.sent[peer] += beyond // len(peers)
                self.heard[peer] += beyond // len(peers)

    def ratios(self, parameters: int, steps: int) -> tuple[float | None, float | None]:
        """(upload, download): how many times less than ring data parallelism in fp32."""
        peers = len(self.sent)
        ring = 2 * (peers - 1) / peers * 4 * parameters * steps
        up, down = self.upload_bytes, self.download_bytes
        return (ring / up if up else None), (ring / down if down else None)

    def _carry(self, sender: int, receiver: int, size: int, arrives: bool = True) -> None:
        self.sent[sender] += size
        self.heard[receiver] += size if arrives else 0
