"""Groups whose members are in threads of one process, with real sockets between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

import atoll.reduce
from atoll.reduce import ReduceOptions

PATIENCE_S = 60.0  # only a failing test waits so long


def found(**wishes) -> atoll.reduce.Group:
    """Found a group; options among the arguments become its `ReduceOptions`."""
    options = {key: wishes.pop(key) for key in list(wishes) if key in ReduceOptions.__dataclass_fields__}
    return atoll.reduce.found(**wishes, options=ReduceOptions(**options))


@contextmanager
def groups(peers: int, names: Sequence[str] = (), **wishes) -> Iterator[list[atoll.reduce.Group]]:
    """This number of members of one group, all closed at the end."""
    names = names or [f"m{i}" for i in range(peers)]
    members = [found(peers=peers, name=names[0], **wishes)]
    try:
        with ThreadPoolExecutor() as pool:
            members += pool.map(lambda name: atoll.reduce.join(members[0].ticket, name=name), names[1:])
        yield members
    finally:
        for member in members:
            member.close()


def together(
    members: list[atoll.reduce.Group], tensors: list[torch.Tensor], **wishes
) -> list[atoll.reduce.ReduceResult]:
    """Results of one call of all members."""
    works = [m.all_reduce_async(t, **wishes) for m, t in zip(members, tensors, strict=True)]
    return [work.wait(PATIENCE_S) for work in works]
