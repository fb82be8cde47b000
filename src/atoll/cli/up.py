"""`atoll up`: founds a run, or resumes the one in this folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from atoll.base.limits import PEERS_MAX
from atoll.cli.display.options import OutputOptions
from atoll.cli.say import Dir, Sets, folder_of

if TYPE_CHECKING:
    from atoll.peer.config.sections import RunConfig

Name = Annotated[
    str,
    Parameter(help="Name of this peer. Default: the computer's name, and the folder's unless that is atoll-run."),
]
Listen = Annotated[
    list[str],
    Parameter(
        negative="",
        env_var="ATOLL_LISTEN",
        help="Multiaddr to listen on, such as /ip4/0.0.0.0/tcp/7071; repeatable. Default: loopback.",
    ),
]
Announce = Annotated[
    list[str],
    Parameter(negative="", help="Multiaddr that others should dial, if it differs; repeatable."),
]
Threads = Annotated[
    int,
    Parameter(
        validator=Number(gte=0),
        help="Threads of the trainer. Default: the cores, divided by the peers that run here.",
    ),
]
Data = Annotated[
    Path | None,
    Parameter(
        help="Train on these data of your own, in the form of the run's; they never leave this computer "
        "(node.data). If data differ between sites, found the run with the recipe fedavg; where members may lie, "
        "with the statistic clipped_caf."
    ),
]
Stay = Annotated[bool, Parameter(negative="", help="Stay when the run is over, to serve the model to latecomers.")]


def with_own_data(settings: RunConfig, data: Path | None) -> RunConfig:
    """These settings with `node.data`, as --data names it."""
    from msgspec.structs import replace

    if data is None:
        return settings
    return replace(settings, node=replace(settings.node, data=str(data.expanduser().absolute())))


def up(
    config: Annotated[Path | None, Parameter(help="run.toml; `atoll init` writes one.")] = None,
    /,
    dir: Dir = None,
    *,
    name: Name = "",
    listen: Listen = [],  # noqa: B006  # cyclopts reads it, no code changes it
    announce: Announce = [],  # noqa: B006
    data: Data = None,
    set: Sets = [],  # noqa: B006
    threads: Threads = 0,
    uses: Annotated[
        int,
        Parameter(
            validator=Number(gte=0, lte=PEERS_MAX),
            help="How many peers may join with its ticket. Default: 64 where run.trust is private, else 1.",
        ),
    ] = 0,
    stay: Stay = False,
    output: OutputOptions = OutputOptions(),
) -> int:
    """Found a run and print its ticket; in a folder that holds a run, resume it."""
    from atoll.runtime.config import load_config
    from atoll.runtime.supervisor import PeerOptions, run_up

    if config is not None and dir is None and config.is_dir():
        config, dir = None, config  # `atoll up FOLDER`
    settings = with_own_data(load_config(config, set), data)
    start = PeerOptions(folder_of(dir), settings, config, name, tuple(listen), tuple(announce), threads, stay, uses)
    from atoll.cli.watch import watched

    return watched(lambda shell: run_up(start, shell), output)
