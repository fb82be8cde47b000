"""The bulk lane between real links: memory, broken connections, order."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import tempfile
from collections.abc import Callable

import numpy as np
import pytest
from islands import ClockworkLoop, Island, Story, closed, pair, story, stranger

from atoll.base.ids import PeerId
from atoll.base.limits import BULK_FRAME_MAX, CONTROL_FRAME_MAX, MIB
from atoll.base.machine import Lane, LinkUp
from atoll.crypto.seal import TAG_BYTES
from atoll.runtime.network.buffer_pool import BufferPool
from atoll.runtime.network.bulk_channel import BOXES_KEPT, STALLED_SWEEPS, RecordBuffers
from atoll.runtime.network.bulk_record import BESIDE_SLAB_MAX, HEAD, MESSAGE, SLAB, SLAB_BYTES
from atoll.runtime.network.connection_manager import SWEEP_S
from atoll.runtime.network.control_channel import ControlFrameKind
from atoll.runtime.network.file_slice import FileSlice, SharedOpenFile
from atoll.runtime.network.link_settings import LinkSettings
from atoll.runtime.network.message_log import ResendQueue
from atoll.runtime.network.tcp import TcpConnection
from atoll.wire.libp2p.framing import frame

pytestmark = pytest.mark.net

EVE = PeerId("eve")


async def eve_with_bulk(ada: Island) -> tuple[asyncio.StreamWriter, asyncio.StreamReader, asyncio.StreamWriter]:
    """A member who speaks our protocol without our code: its control connection, and its bulk connection."""
    _, control = await stranger(ada)
    control.write(b"atoll/plain/1" + bytes((Lane.CONTROL, 3)) + b"eve")
    await ada.until(lambda: LinkUp(EVE) in ada.events)
    reader, bulk = await stranger(ada)
    bulk.write(b"atoll/plain/1" + bytes((Lane.BULK, 3)) + b"eve")
    return control, reader, bulk


def record(kind: int, payload_bytes: int, number: int, body: bytes, index: int = 0) -> bytes:
    return HEAD.pack(kind, len(body), payload_bytes, index, number) + body + bytes(TAG_BYTES)


def test_the_bytes_of_the_specification():
    """specs/links.md, word for word: who changes these changes the protocol's version."""
    assert HEAD.pack(SLAB, SLAB_BYTES, MIB, 1, 7).hex(" ", -4) == (
        "01000000 00080000 00100000 00000001 00000000 00000007"
    )
    assert frame(bytes((ControlFrameKind.RETIRE,))) == b"\0\0\0\1\3"
    assert [word.name for word in ControlFrameKind] == [
        "MESSAGE",
        "WELCOME",
        "REFUSED",
        "RETIRE",
        "MORE_BULK",
        "ACK",
    ]
    assert ResendQueue(b"", 0).state_count() == bytes(8)


@story
async def test_unfinished_frames_of_one_peer_stay_below_its_ceiling():
    """Eve begins 40 frames of 64 MiB and ends none: ada holds four of them, and hears the one that is finished."""
    ada = await Island("ada", plain=True).open()
    control, _, bulk = await eve_with_bulk(ada)
    for number in range(40):
        bulk.write(record(MESSAGE, BULK_FRAME_MAX, number, b"never finished"))
    bulk.write(record(MESSAGE, 3, 99, b"a word") + record(SLAB, 3, 99, b"abc"))
    await ada.until(lambda: ada.heard == [("eve", b"a word", 3)])
    assert ada.links.stats()[EVE].bulk_lost == 37  # the small one needed room too
    control.close()
    bulk.close()
    await ada.until(lambda: len(ada.events) == 2)
    await closed(ada)


@story
async def test_records_that_contradict_each_other_end_the_connection():
    """Other size, slab twice, slab too short, slab beyond the end, two messages, body longer than allowed."""
    begun = record(MESSAGE, 2 * SLAB_BYTES, 1, b"part")
    slab = bytes(SLAB_BYTES)
    for bad in (
        begun + record(SLAB, 2 * SLAB_BYTES + 1, 1, slab),
        begun + 2 * record(SLAB, 2 * SLAB_BYTES, 1, slab),
        begun + record(SLAB, 2 * SLAB_BYTES, 1, slab[1:]),
        begun + record(SLAB, 2 * SLAB_BYTES, 1, b"", index=2),
        begun + begun,
        HEAD.pack(SLAB, SLAB_BYTES + 1, BULK_FRAME_MAX, 0, 1),
        HEAD.pack(MESSAGE, CONTROL_FRAME_MAX + 1, 0, 0, 1),
        HEAD.pack(MESSAGE, 0, BULK_FRAME_MAX + 1, 0, 1),
        HEAD.pack(SLAB, 0, 2**32 - 1, 0, 1),
        HEAD.pack(2, 0, 0, 0, 1),
    ):
        ada = await Island("ada", plain=True).open()
        control, reader, bulk = await eve_with_bulk(ada)
        bulk.write(bad)
        async with asyncio.timeout(10):
            try:
                rest = await reader.read()
            except ConnectionError:
                rest = b""
        assert rest == b"atoll/plain/1" + bytes((Lane.BULK, 3)) + b"ada" or rest == b""
        assert ada.links.stats()[EVE].bulk_connections == 0
        assert ada.heard == []
        control.close()
        bulk.close()
        await closed(ada)


def unhurried(test: Story) -> Callable[[], None]:
    """A story on clockwork that gives the kernel time also on a busy computer: nothing else here wakes the loop."""
    return story(test, lambda: ClockworkLoop(kernel_s=0.05))


async def eve_with_half_a_frame(
    ada: Island,
) -> tuple[asyncio.StreamWriter, asyncio.StreamReader, asyncio.StreamWriter]:
    """The first of two slabs is there, and so is the small frame behind it."""
    control, reader, bulk = await eve_with_bulk(ada)
    bulk.write(record(MESSAGE, 2 * SLAB_BYTES, 1, b"part") + record(SLAB, 2 * SLAB_BYTES, 1, bytes(SLAB_BYTES)))
    bulk.write(record(MESSAGE, 0, 2, b"so far"))
    await ada.until(lambda: (EVE, b"so far", 0) in ada.heard)
    return control, reader, bulk


@unhurried
async def test_a_frame_goes_on_after_an_hour_in_which_its_receiver_stood_still():
    """A computer that was suspended has heard nothing of anybody, and its connections may be as they were."""
    ada = await Island("ada", plain=True).open()
    control, _, bulk = await eve_with_half_a_frame(ada)
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ClockworkLoop)
    loop.compute(3600.0)
    await asyncio.sleep(SWEEP_S)  # so the sweep that was due long ago is over
    bulk.write(record(SLAB, 2 * SLAB_BYTES, 1, bytes(SLAB_BYTES), index=1))
    await ada.until(lambda: (EVE, b"part", 2 * SLAB_BYTES) in ada.heard or not ada.links.stats()[EVE].up)
    assert ada.links.stats()[EVE].bulk_lost == 0
    control.close()
    bulk.close()
    await closed(ada)


@unhurried
async def test_a_frame_of_which_nothing_more_comes_gives_its_memory_back():
    """What comes of it after all is thrown away, and what comes behind it is heard."""
    ada = await Island("ada", plain=True).open()
    control, _, bulk = await eve_with_half_a_frame(ada)
    await asyncio.sleep(STALLED_SWEEPS * SWEEP_S)
    assert ada.links.stats()[EVE].bulk_lost == 0
    await asyncio.sleep(2 * SWEEP_S)
    assert ada.links.stats()[EVE].bulk_lost == 1
    bulk.write(record(SLAB, 2 * SLAB_BYTES, 1, bytes(SLAB_BYTES), index=1) + record(MESSAGE, 0, 3, b"the next"))
    await ada.until(lambda: (EVE, b"the next", 0) in ada.heard)
    assert (EVE, b"part", 2 * SLAB_BYTES) not in ada.heard
    control.close()
    bulk.close()
    await closed(ada)


@story
async def test_peers_wait_for_memory_instead_of_losing_frames():
    """Room for one frame only, four peers send one each at the same time: reading waits, all arrive."""
    tight = LinkSettings(receive_total_bytes=BULK_FRAME_MAX + CONTROL_FRAME_MAX)
    ada = await Island("ada", settings=tight).open()
    others = [Island(f"island {n}") for n in range(4)]
    for other in others:
        await other.links.dial(ada.address)
    payload = os.urandom(MIB) * 40
    for other in others:
        assert other.links.send(ada.name, b"part", Lane.BULK, payload)
    await ada.until(lambda: len(ada.heard) == 4)
    assert {sender for sender, _, _ in ada.heard} == {other.name for other in others}
    assert all(part == payload for part in ada.payloads)
    await closed(ada, *others)


@story
async def test_a_broken_bulk_connection_is_replaced_and_what_arrives_is_intact():
    """Four stripes; in the middle of ten frames one is cut at the receiver. Frames may be lost, never damaged."""
    ada, bob = await pair(settings=LinkSettings(bulk_connections=4))
    payloads = [os.urandom(MIB) * 16 for _ in range(10)]
    for payload in payloads:
        ada.links.send(bob.name, b"part", Lane.BULK, payload)
    await bob.until(lambda: bob.heard)
    bob.links._links[ada.name].bulk.channels[0].connection.abort()
    payloads.append(os.urandom(MIB))
    while bob.heard[-1][1] != b"last":  # what was in the cut connection's buffers is lost, by contract
        ada.links.send(bob.name, b"last", Lane.BULK, payloads[-1])
        heard = len(bob.heard)
        await bob.until(lambda heard=heard: len(bob.heard) > heard)
    stats = ada.links.stats()[bob.name]
    assert {bytes(part) for part in bob.payloads} <= set(payloads)
    assert len(bob.events) == len(ada.events) == 1
    assert stats.bulk_connections == 4 and stats.bulk_queued_bytes >= 0
    await closed(ada, bob)


@story
async def test_a_stretch_of_a_file_arrives_also_without_its_name_and_never_short():
    """Two files lose their names before their bytes leave, one of them its end, too: that never arrives, what comes
    after it does."""
    ada, bob = await pair()
    data, stretches = os.urandom(3 * MIB), list[FileSlice]()
    for left in (len(data), MIB + MIB // 2):
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            stretches.append(FileSlice(SharedOpenFile(file.name), 1000, 1000 + 2 * MIB))
            file.truncate(left)
    ada.links.send(bob.name, b"whole", Lane.BULK, stretches[0])
    await bob.until(lambda: bob.heard)
    ada.links.send(bob.name, b"short", Lane.BULK, stretches[1])
    while bob.heard[-1][1] != b"last":  # it may fall with the connection
        ada.links.send(bob.name, b"last", Lane.BULK, b"words")
        heard = len(bob.heard)
        await bob.until(lambda heard=heard: len(bob.heard) > heard)
    assert bob.heard[0][1] == b"whole" and bob.payloads[0] == data[1000 : 1000 + 2 * MIB]
    assert {message for _, message, _ in bob.heard} == {b"whole", b"last"}
    await closed(ada, bob)


@story
async def test_payload_memory_comes_from_the_caller():
    """The driver may want payloads in memory of its own, say shared with the trainer."""
    mine: list[np.ndarray] = []

    def allocate(size_bytes: int) -> memoryview:
        mine.append(np.zeros(size_bytes, np.uint8))
        return memoryview(mine[-1])

    ada, bob = await pair(allocate=allocate)
    payload = os.urandom(2 * MIB)
    ada.links.send(bob.name, b"part", Lane.BULK, payload)
    await bob.until(lambda: bob.heard)
    assert mine[0].tobytes() == payload
    await closed(ada, bob)


@story
async def test_a_payload_is_hashed_on_its_way_in_whatever_the_order_of_its_slabs():
    """Eve sends five slabs out of order, then a payload without any; a word without a payload is not followed."""
    slabs = [os.urandom(SLAB_BYTES) for _ in range(4)] + [b"the last one is short"]
    whole = b"".join(slabs)
    ada = await Island("ada", plain=True, follow=hashlib.sha256).open()
    control, _, bulk = await eve_with_bulk(ada)
    for index in (1, 0, 4, 2, 3):
        bulk.write(record(SLAB, len(whole), 1, slabs[index], index))
    bulk.write(record(MESSAGE, len(whole), 1, b"a part") + record(MESSAGE, 0, 2, b"an empty one"))
    bulk.write(record(MESSAGE, 2**32 - 1, 3, b"a word"))
    await ada.until(lambda: len(ada.heard) == 3)
    assert ada.payloads[0] == whole
    assert ada.followed == [hashlib.sha256(whole).digest(), hashlib.sha256(b"").digest(), None]
    control.close()
    bulk.close()
    await closed(ada)


def test_memory_is_used_again_only_when_nobody_looks_at_it():
    memory = BufferPool()
    first = memory(4 * MIB)
    first[:5] = b"first"
    slice_of_it = first[1:5]
    del first
    second = memory(4 * MIB)
    second[:5] = b"other"
    assert slice_of_it == b"irst"
    del slice_of_it
    gc.collect()
    third = memory(3 * MIB)
    assert third[:5] == b"first" and len(third) == 3 * MIB
    del second, third
    memory.sweep()
    memory.sweep()
    assert memory._free == []


def test_memory_keeps_no_more_than_it_may():
    memory = BufferPool(kept_bytes_max=8 * MIB)
    views = [memory(4 * MIB) for _ in range(5)]
    views.clear()
    memory(16 * MIB)
    assert sum(block.used_bytes for block in memory._free) == 8 * MIB


def test_parts_that_shrink_and_grow_a_little_lie_in_the_same_memory():
    """Shares of owners follow measured links: a round's parts are never quite as large as those of the last one."""
    memory = BufferPool()
    addresses = {np.frombuffer(memory(size), np.uint8).ctypes.data for size in (9 * MIB, 12 * MIB, 7 * MIB + 1)}
    assert len(addresses) == 1


@story
async def test_a_frame_that_waits_gives_its_turn_to_a_newer_one_of_its_place():
    """Nothing has left yet: of three words about one part only the last is said, in the turn of the first."""
    ada, bob = await pair()
    send = ada.links.send
    for word, place in ((b"old", 7), (b"other", 8), (b"newer", 7), (b"no place", None), (b"newest", 7)):
        send(bob.name, word, Lane.BULK, word * 1000, place)
    send(bob.name, b"no place", Lane.BULK, b"a", None)
    await bob.until(lambda: len(bob.heard) == 4)
    assert [word for _, word, _ in bob.heard] == [b"newest", b"other", b"no place", b"no place"]
    assert ada.links.stats()[bob.name].bulk_dropped == 0
    send(bob.name, b"after", Lane.BULK, b"a", 7)  # what has left is replaced by nothing
    await bob.until(lambda: len(bob.heard) == 5)
    await closed(ada, bob)


@story
async def test_what_was_said_in_rounds_long_over_is_not_sent_to_a_peer_that_could_not_read_it():
    """Rows and answers of rounds 3 to 5 wait for it when round 5 is closed here: it gets those of 5, and what it
    asked for itself. Bytes that do not leave are not counted as waiting."""
    ada, bob = await pair()
    send, lane = ada.links.send, ada.links._links[bob.name].bulk
    for word, place, of_round in (
        (b"row 3", 7, 3),
        (b"answer 3", None, 3),
        (b"asked for", None, None),
        (b"answer 4", None, 4),
        (b"answer 5", None, 5),
    ):
        send(bob.name, word, Lane.BULK, word * 1000, place, of_round)
    ada.links.drop_rounds(5)
    assert lane.queued_bytes == sum(len(word) * 1001 for word in (b"asked for", b"answer 5"))
    send(bob.name, b"row 6", Lane.BULK, b"a", 7, 6)  # the place of what is gone is free
    await bob.until(lambda: len(bob.heard) == 3)
    assert [word for _, word, _ in bob.heard] == [b"asked for", b"answer 5", b"row 6"]
    assert ada.links.stats()[bob.name].bulk_dropped == 0
    await closed(ada, bob)


@story
async def test_a_message_leaves_together_with_the_first_slab_unless_both_do_not_fit():
    """Counts what is written for one frame each, of a word and of messages about as long as a box has room for."""
    ada, bob = await pair()
    ada.links.send(bob.name, b"first", Lane.BULK, b"opens the lane")
    await bob.until(lambda: bob.heard)
    written: list[int] = []
    write = TcpConnection.write

    def counted(connection: TcpConnection, data: bytes | memoryview) -> None:
        if connection in (channel.connection for channel in ada.links._links[bob.name].bulk.channels):
            written.append(len(data))
        write(connection, data)

    payload, around = os.urandom(SLAB_BYTES + 1), HEAD.size + TAG_BYTES
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TcpConnection, "write", counted)
        for size, writes in ((4, 2), (BESIDE_SLAB_MAX, 2), (BESIDE_SLAB_MAX + 1, 3), (CONTROL_FRAME_MAX, 3)):
            written.clear()
            ada.links.send(bob.name, bytes(size), Lane.BULK, payload)
            heard = len(bob.heard)
            await bob.until(lambda heard=heard: len(bob.heard) > heard)
            assert (len(bob.heard[-1][1]), bytes(bob.payloads[-1])) == (size, payload)
            assert (len(written), sum(written)) == (writes, size + len(payload) + 3 * around)
    await closed(ada, bob)


def test_of_boxes_that_nobody_uses_few_outlive_a_sweep():
    """Twenty at once are used again, the last one first; what is in use is nobody's to take."""
    boxes = RecordBuffers()
    lent = [boxes.acquire() for _ in range(20)]
    for box in lent:
        boxes.release(box)
    assert [id(boxes.acquire()) for _ in range(20)] == [id(box) for box in reversed(lent)]
    for box in lent:
        boxes.release(box)
    boxes.sweep()
    kept = [id(boxes.acquire()) for _ in range(BOXES_KEPT + 1)]
    assert kept[:BOXES_KEPT] == [id(box) for box in reversed(lent[-BOXES_KEPT:])]
    assert kept[BOXES_KEPT] not in map(id, lent)
