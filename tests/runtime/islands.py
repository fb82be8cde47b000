"""Peers that write down all they hear, for the tests about links, and a clock that waits for nobody."""

from __future__ import annotations

import asyncio
import gc
import selectors
from collections.abc import Callable, Coroutine

from atoll.base.ids import PeerId
from atoll.base.machine import LinkDown, LinkUp
from atoll.crypto.identity import Identity
from atoll.runtime.network.connection_manager import ConnectionManager
from atoll.runtime.network.libp2p import Libp2pSecurity
from atoll.runtime.network.link_settings import LinkCallbacks
from atoll.runtime.network.secure_channel import PlainSessionFactory

NETWORK = b"a test"
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
PATIENCE_S = 60.0  # only a hanging test waits so long
KERNEL_S = 0.002  # for loopback to carry what is under way, before the clock may jump


class Island:
    """A peer that writes down all it hears."""

    def __init__(
        self,
        name: str,
        *,
        plain: bool = False,
        network: bytes = NETWORK,
        allow: Callable[[PeerId], bool] = lambda peer: True,
        **options: object,
    ) -> None:
        if plain:
            self.name = PeerId(name)
            self.security = PlainSessionFactory(self.name, insecure=True)
        else:
            identity = Identity.from_seeds(name.encode().ljust(32), name.encode().ljust(32))
            self.name = identity.peer
            self.security = Libp2pSecurity(identity, network, foreign=True)
        self.heard: list[tuple[str, bytes, int | None]] = []  # sender, message, payload bytes
        self.payloads: list[memoryview | None] = []
        self.followed: list[bytes | None] = []  # what the follower made of each
        self.events: list[LinkUp | LinkDown] = []
        self._news = asyncio.Event()
        self.links = ConnectionManager(
            self.name, self.security, LinkCallbacks(self._event, self._message, allow=allow), **options
        )
        self.address = ""

    async def open(self) -> Island:
        (self.address,) = await self.links.listen([LOOPBACK])
        return self

    def _event(self, event: LinkUp | LinkDown) -> None:
        self.events.append(event)
        self._news.set()

    def _message(self, sender: PeerId, message: bytes, payload: memoryview | None, followed: bytes | None) -> None:
        self.heard.append((sender, message, None if payload is None else len(payload)))
        self.payloads.append(payload)
        self.followed.append(followed)
        self._news.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def up(self, *others: Island) -> None:
        await self.until(lambda: {LinkUp(other.name) for other in others} <= set(self.events))


class _Patient(selectors.DefaultSelector):
    """Says how long the loop wanted to wait, instead of waiting."""

    def __init__(self, kernel_s: float) -> None:
        super().__init__()
        self.passed_s, self._kernel_s = 0.0, kernel_s

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        ready = super().select(self._kernel_s)
        if not ready:
            self.passed_s += timeout
        return ready


class ClockworkLoop(asyncio.SelectorEventLoop):
    """A day passes here as soon as everybody waits for it. Computing takes no time at all, on no computer."""

    def __init__(self, kernel_s: float = KERNEL_S) -> None:
        self._clock = _Patient(kernel_s)
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.passed_s

    def compute(self, for_s: float) -> None:
        """All but this."""
        self._clock.passed_s += for_s


Story = Callable[[], Coroutine[None, None, None]]


def story(test: Story, loop: Callable[[], asyncio.AbstractEventLoop] | None = None) -> Callable[[], None]:
    """Run a test as a coroutine; whatever it leaves behind in the loop is its failure."""

    def run() -> None:
        async def whole() -> None:
            mistakes: list[dict[str, object]] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, context: mistakes.append(context))
            await test()
            gc.collect()  # an exception nobody looked at is reported when its future dies
            assert not mistakes

        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(whole())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def clockwork(test: Story) -> Callable[[], None]:
    """A story whose time is the loop's: deadlines cost nothing, and no load brings them nearer."""
    return story(test, ClockworkLoop)


async def pair(**options: object) -> tuple[Island, Island]:
    """ada dials bob."""
    ada, bob = await Island("ada", **options).open(), await Island("bob", **options).open()
    ada.links.contact(bob.name, (bob.address,))
    await asyncio.gather(ada.up(bob), bob.up(ada))
    return ada, bob


async def closed(*islands: Island) -> None:
    for island in islands:
        await island.links.close()


async def stranger(island: Island) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Somebody who connects and has not said anything yet."""
    return await asyncio.open_connection("127.0.0.1", int(island.address.rsplit("/", 1)[1]))
