"""All-reduce as a library: encrypted, elastic, with an exact list of contributors per result.

    group = atoll.reduce.found(peers=4)           # prints nothing; hand group.ticket to the others
    group = atoll.reduce.join(ticket)             # in every other process, anywhere
    done = group.all_reduce([tensor, ...])        # the mean, in place; done.contributors lists its members

Every call is one agreed round of the protocol that trains models (`peer/round/machine.py`). Members may die at any
moment, and new ones join with the ticket between calls. All members make the same calls in the same order, with
tensors of the same sizes. The work runs in a background thread of this process.

Invariants:
- After a call all members hold the same bits, or the call fails with a reason.
- A mean never covers fewer members than its result reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from atoll.base.arguments import Peers, arguments, checked_options
from atoll.base.errors import AtollError, UsageError
from atoll.base.ids import Seconds
from atoll.base.limits import PEERS_MAX, PIECES_MAX
from atoll.peer.settings import RunSettings
from atoll.policy.fault_tolerance import StatisticName
from atoll.policy.plan import RoundSettings
from atoll.runtime.allreduce.call import GATHERED, GroupTerms
from atoll.runtime.allreduce.call_checks import CODE, FOREVER_S, codec_name, known_topology, row_topology
from atoll.runtime.allreduce.driver import GroupDriver, own_folder
from atoll.runtime.allreduce.group import MEET_S, SLICE_BYTES, Group
from atoll.runtime.allreduce.parts import PART_VALUES
from atoll.runtime.allreduce.trust import distrusting
from atoll.runtime.bootstrap import ListenOptions, TicketTerms, found_run, join_run
from atoll.runtime.network.addresses import listening
from atoll.runtime.training_spec import FoundingBlobs, check_vertex_room

RATE_MAX = 2**40  # bytes per second; above any link's rate
STATE = b"atoll/group/1"  # initial state of every group: empty, since members bring their tensors
SPAN_MIN_S = 0.1  # below this, heartbeats cost more than the calls they watch

Rate = Annotated[int, Meta(ge=0, le=RATE_MAX)]
Span = Annotated[Seconds, Meta(ge=SPAN_MIN_S, le=FOREVER_S)]


@checked_options("atoll.reduce.ReduceOptions", CODE)
@dataclass(frozen=True, kw_only=True)
class ReduceOptions:
    """Options of `atoll.reduce.found`. UsageError if a value is out of its range.

    `way_back` encodes the mean that comes back; default: the group's `codec`. With `randk` both ways, each mean has
    other places and is zero elsewhere, for `ErrorFeedback`. With "gathered" all members get all rows, or their mean
    in fp32 if that is shorter, so nothing is lost a second time. As many bytes come back as all members sent, and
    topologies with partial sums are excluded.
    `remembered`: members own the same values in every call. They keep in the `ErrorFeedback` of their own call what
    their results left out, and send it with later results: only the bytes of `way_back`.
    `silence_s`: a member that is silent for so many seconds counts as gone.
    `listen`: addresses, for members on other computers such as /ip4/0.0.0.0/tcp/7071; default: ATOLL_LISTEN.
    `announce`: addresses under which others reach this member. `name`: name of this member.
    `upload_bytes_s`: most bytes per second that this member sends; 0: no limit.
    """

    way_back: str = ""
    remembered: bool = False
    silence_s: Span = 6.0
    name: str = ""
    listen: tuple[str, ...] = ()
    announce: tuple[str, ...] = ()
    upload_bytes_s: Rate = 0


@arguments("atoll.reduce.found", CODE)
def found(
    *,
    peers: Peers = 1,
    codec: str = "fp32",
    topology: str = "auto",
    trust: str = "private",
    statistic: StatisticName = "mean",
    timeout_s: Span = 60.0,
    options: ReduceOptions | None = None,
) -> Group:
    """Found a group with this process as its first member; the first all-reduce begins when `peers` are present.

    `codec` encodes what members send (specs/codecs.md). `topology` "auto" is a hierarchy if names show several
    places: "eu/ada" is near "eu/bob" and far from "us/cleo". Otherwise it is the cheapest one on the links that
    members have measured and agreed on. A call may choose another.

    `timeout_s`: a member passes if its user has not called for that long while others wait. A member that is
    reachable but does not answer for its part is replaced after 5 x `timeout_s`, or after the time that three such
    calls take at 2 Mbit/s. If members may lie, this limit is four times what all but a third of them took.

    `trust` "community" or "open" tolerates liars among up to a third of the members. Rows are combined by
    `statistic` (docs/reference/config.md), and owners are spot-checked or watch each other (specs/trust.md,
    specs/openings.md). The default stays a mean: no member can falsify the sum, but one member can move it by what
    it sends. `statistic="trimmed_mean"`, or "robust" with "community", withstands that. If the group shrinks below
    what withstands one liar, calls wait for others to join, and fail with E-RED-21 after `timeout_s`.

    `options` holds everything else, see help(atoll.reduce.ReduceOptions). Raises UsageError for settings that do
    not fit together.
    """
    wish = options or ReduceOptions()
    topology, codec = known_topology(topology), codec_name(codec)
    if wish.remembered and wish.way_back == GATHERED:
        raise UsageError("E-RED-08", f'remembered = True with way_back = "{GATHERED}"', fix="leave one of them out")
    if wish.remembered or wish.way_back == GATHERED:
        needs_rows = "remembered = True" if wish.remembered else f'way_back = "{GATHERED}"'
        topology = row_topology(topology, trust, needs_rows)
    way_back = codec_name(wish.way_back) if wish.way_back not in ("", GATHERED) else wish.way_back
    rounds = RoundSettings(
        inner_steps=1,
        first_train_s=FOREVER_S,
        train_max_s=FOREVER_S,
        owner_s=max(timeout_s, wish.silence_s),
        suspect_s=wish.silence_s,
        beat_s=min(2.0, wish.silence_s / 3),
    )
    settings = RunSettings(
        name="group",
        start_peers=peers,
        round=rounds,
        topology=topology,
        pieces=min(PIECES_MAX, max(1, SLICE_BYTES // (4 * PART_VALUES * max(peers, 2)))),
        update_bytes=SLICE_BYTES,
        spread=True,
        learning=msgspec.msgpack.encode(GroupTerms(codec, way_back, timeout_s)),
        steady=True if wish.remembered else msgspec.UNSET,
    )
    settings = distrusting(settings, trust, statistic, codec, way_back or codec, peers)
    check_vertex_room(settings)
    return Group(_found_group(settings, wish))


async def _found_group(settings: RunSettings, wish: ReduceOptions) -> tuple[GroupDriver, str]:
    founded = FoundingBlobs(settings, (STATE,))
    where = ListenOptions(listening(wish.listen), wish.announce, wish.upload_bytes_s)
    invitation = TicketTerms(uses=PEERS_MAX)  # members of a group come and go
    with own_folder() as folder:
        host, ticket = await found_run(folder, founded, wish.name, where, invitation, GroupDriver, durable=False)
    host.start()
    return host, ticket.text


@arguments("atoll.reduce.join", CODE)
def join(
    ticket: str,
    *,
    name: str = "",
    via: tuple[str, ...] = (),
    listen: tuple[str, ...] = (),
    announce: tuple[str, ...] = (),
    upload_bytes_s: Rate = 0,
    client: bool = False,
) -> Group:
    """Join the ticket's group; returns when its members have admitted this one.

    `via` are addresses of other members (`group.addresses`), needed if the member that issued the ticket is gone. A
    `client` cannot be dialed: it dials out, counts in means, owns no part and has no vote. `upload_bytes_s` limits
    what it sends, in bytes per second; 0: no limit. Raises the ticket's own error, or NetworkError if the group
    does not admit it within two minutes.
    """

    async def opening() -> tuple[GroupDriver, str]:
        where, role = ListenOptions(listening(listen), announce, upload_bytes_s), "client" if client else "trainer"
        with own_folder() as folder:
            host = await join_run(folder, ticket, role, name, where, GroupDriver, durable=False)
        host.bootstrap += tuple((address, None) for address in via)
        host.start()
        try:
            await host.seated(MEET_S)
        except AtollError:
            await host.stop()
            raise
        return host, ticket

    return Group(opening())
