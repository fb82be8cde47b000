"""`atoll demo`: a swarm of real peers on this computer that trains a small text model in a few minutes."""

from __future__ import annotations

import asyncio
import sys
from contextlib import nullcontext
from pathlib import Path
from shutil import rmtree
from signal import SIGTERM
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from atoll.base.ids import printable
from atoll.base.units import bytes_text, per_second_text, seconds_text
from atoll.cli.say import AsJson, Sets, say, say_json

if TYPE_CHECKING:
    from rich.live import Live

    from atoll.runtime.demo import DemoRun

DemoDevice = Literal["cpu", "cuda", "auto"]


def demo(
    *,
    peers: Annotated[int, Parameter(help="How many peers train together. Default: 4.")] = 4,
    rounds: Annotated[
        int | None,
        Parameter(validator=Number(gte=1), help="Training rounds. Default: as the demo's recipe has it."),
    ] = None,
    seed: Annotated[int, Parameter(help="Seed of the first weights and of the data order.")] = 0,
    chaos: Annotated[
        bool, Parameter(negative="", help="Kill the founder mid-round and let a new peer join late.")
    ] = False,
    solo: Annotated[bool, Parameter(negative="", help="Also train one peer alone, for comparison.")] = False,
    device: Annotated[DemoDevice, Parameter(help="Where trainers compute; auto: a GPU if there is one.")] = "cpu",
    dir: Annotated[
        Path | None, Parameter(help="Where the peers' folders go. Default: a new temporary folder.")
    ] = None,
    set: Sets = [],  # noqa: B006  # cyclopts reads it, no code changes it
    json: AsJson = False,
) -> int:
    """Train a small GPT on Python's own sources with peers on this computer; no account, no download.

    Succeeds if all peers end with the same bits and a validation loss of at most 1.9 (with --set or fewer
    rounds: at least 25 % less than at the start).
    """
    from atoll.runtime.demo import DemoRun, DemoSettings, versions

    settings = DemoSettings(peers, rounds, seed, chaos, solo, tuple(set), device)
    folder = dir or Path(mkdtemp(prefix="atoll-demo-"))
    screen = _DemoScreen(quiet=json)

    async def main() -> Any:
        swarm = DemoRun(settings, folder, screen.change)
        screen.swarm = swarm
        ours = asyncio.current_task()
        assert ours is not None
        asyncio.get_running_loop().add_signal_handler(SIGTERM, ours.cancel)
        return await swarm.run()

    try:
        with screen.live or nullcontext():
            outcome = asyncio.run(main())
    except (KeyboardInterrupt, asyncio.CancelledError) as why:
        if dir is None:
            rmtree(folder, ignore_errors=True)
        raise KeyboardInterrupt from why
    if dir is None and screen.swarm is not None:
        screen.swarm.tidy(outcome)
    figures = outcome.figures
    if json:
        say_json(
            {
                "bench": "demo",
                "settings": {
                    "peers": peers,
                    "rounds": figures["rounds"],
                    "seed": seed,
                    "chaos": chaos,
                    "solo": solo,
                    "device": device,
                    "set": set,
                    "loss_bar": outcome.bar,
                },
                "figures": figures,
                "versions": versions(),
            }
        )
    else:
        _say_outcome(outcome)
    return 0 if outcome.reached else 5


class _DemoScreen:
    """Live picture with the events above it; plain lines if there is no terminal."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.trained = quiet, 0
        self.swarm: DemoRun | None = None
        self.live: Live | None = None
        if sys.stdout.isatty() and not quiet:
            from rich import live
            from rich.console import Console

            self.live = live.Live(
                console=Console(highlight=False, markup=False), refresh_per_second=4, transient=True
            )

    def change(self, line: str) -> None:
        if self.quiet:
            return
        if line:
            self.live.console.print(printable(line)) if self.live else say(line)
        if self.live and self.swarm is not None:
            self.live.update(self.picture())
        elif self.swarm is not None and self.swarm.shown.trained > self.trained:
            self.trained = self.swarm.shown.trained
            p = self.swarm.shown
            rate = per_second_text(p.tokens_per_s, p.unit)
            say(f"round {p.trained}/{p.rounds}  loss {p.loss:.3f}  {rate}".rstrip())

    def picture(self) -> Any:
        from atoll.cli.picture import swarm_picture

        s = self.swarm
        assert s is not None
        seen = {c.name: c.progress for c in s.children}
        gone = {c.name: c.gone for c in s.children if c.gone}
        return swarm_picture(list(seen), seen, gone, s.shown, s.sent, s.data_parallel)


def _say_outcome(outcome: Any) -> None:
    f = outcome.figures
    say()
    if outcome.sample:
        say(f"the trained model writes:\n\n{outcome.sample.rstrip()}\n")
    right = f"{f['val_accuracy_end']:.0%} of the {outcome.unit} guessed right"
    say(f"validation loss {f['val_loss_start']:.3f} -> {f['val_loss_end']:.3f}, {right}, {f['rounds']} rounds")
    if f["val_loss_solo"] is not None:
        say(f"  one peer alone, the same steps: {f['val_loss_solo']:.3f}")
    same = "the same state, bit for bit" if f["state_hashes_equal"] else "DIFFERENT STATES"
    say(f"  {f['peers_at_the_end']} peers ended with {same}")
    less = f["bytes_data_parallel"] / f["bytes_sent"] if f["bytes_sent"] else 0.0
    say(
        f"  {bytes_text(f['bytes_sent'])} sent by all; data-parallel training would have sent "
        f"{bytes_text(f['bytes_data_parallel'])}, {less:.0f}x"
    )
    say(f"  {seconds_text(f['wall_s'])}; the model is in {outcome.model}")
    say(f"  try: atoll plot {outcome.record}, or atoll up and atoll join on two computers")
    if not outcome.reached:
        say(f"  ! the bar was a validation loss of {outcome.bar:.3f} and one state for all")
