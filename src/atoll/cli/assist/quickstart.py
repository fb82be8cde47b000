"""`atoll quickstart`: five questions, a short run.toml, and the commands for every machine.

Answers come from options, else from the terminal; without a terminal the usual answers hold. The settings are
checked as `atoll up` checks them before a file is written.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from cyclopts import Parameter

from atoll.base.errors import UsageError
from atoll.base.limits import PEERS_MAX
from atoll.base.units import counted_text, parse_rate_bytes_s
from atoll.cli.say import AsJson, folder_of, say, say_json

PORT = 7071
LIARS_FROM = 4  # machines among which one may lie
NEAR = ("local", "lan")  # answers about links that are no rate
FAST_BYTES_S = 12.5e6  # from 100 Mbit/s on the plain recipe waits little


class RunAnswers(NamedTuple):
    """Checked answers to the five questions."""

    machines: int
    trust: str
    model: str
    data: str
    link: str


class RunLength(NamedTuple):
    """How long the run trains, as its recipe has it."""

    rounds: int
    steps: int  # of each machine in a round


class SetupQuestion(NamedTuple):
    """One question: its option, its text, the usual answer, and a check that returns the value or raises."""

    option: str
    text: str
    usual: str
    check: Callable[[str], Any]


def quickstart(
    file: Annotated[Path, Parameter(help="File to write.")] = Path("run.toml"),
    /,
    *,
    machines: Annotated[str, Parameter(help="How many machines train, this one included.")] = "",
    trust: Annotated[str, Parameter(help="Who takes part: private, community or open.")] = "",
    model: Annotated[str, Parameter(help="A built-in model.")] = "",
    data: Annotated[str, Parameter(help="stdlib, or a file or folder.")] = "",
    link: Annotated[
        str,
        Parameter(help="How the machines reach each other: local, lan, or over the internet: an uplink, 20Mbit."),
    ] = "",
    force: Annotated[bool, Parameter(negative="", help="Overwrite the file.")] = False,
    json: AsJson = False,
) -> None:
    """Ask five questions, write a short run.toml, and print the commands for every machine.

    An option answers its question. Without a terminal, the usual answers hold for the others.
    """
    if file.exists() and not force:
        raise UsageError(
            "E-ARG-08", f"{file} is there already", fix=f"atoll quickstart {file} --force, or name another file"
        )
    given = {"machines": machines, "trust": trust, "model": model, "data": data, "link": link}
    asks = sys.stdin.isatty() and not json
    found = dict[str, Any]()
    for question in questions(found):
        found[question.option] = _answer(question, given[question.option], asks)
    answers = RunAnswers(**found)
    length = _length_of(run_toml(answers), file)
    text = run_toml(answers, length)
    try:
        file.write_text(text, "utf-8")
    except OSError as why:
        raise UsageError("E-ARG-04", f"cannot write {file}: {why.strerror}", fix="name another file") from None
    commands = commands_of(answers, file)
    if json:
        return say_json({"path": str(file), "answers": answers._asdict(), "commands": commands} | length._asdict())
    if not asks and (usual := [q for q in questions() if not given[q.option]]):
        options = " ".join(f"--{q.option} {q.usual}" for q in usual)
        say(f"no question was asked, because standard input is no terminal; the usual answers: {options}")
    say(f"wrote {file}:\n")
    say(text)
    say(_length_text(length, file))
    for place, command in commands:
        say(f"{place}:\n\n  {command}\n")
    say("every setting: atoll config --all; what rounds cost on your links: atoll plan --help")


def questions(found: Mapping[str, Any] = MappingProxyType({})) -> tuple[SetupQuestion, ...]:
    """The questions; `found` will hold the answers to earlier ones when a later one is checked."""
    return (
        SetupQuestion("machines", "How many machines train, this one included?", "2", _machines),
        SetupQuestion(
            "trust",
            "Who takes part?\n"
            "  private    your own machines: they may crash, but do not lie\n"
            "  community  people who invited each other: up to a third may lie; 4 machines at least\n"
            "  open       strangers: more owners check each other; 4 machines at least",
            "private",
            partial(_trust, found),
        ),
        SetupQuestion(
            "model",
            "Which model? gpt-tiny (168 k), gpt-small (1 M), gpt-10m, gpt-100m, llama-10m, cnn-mnist, …\n"
            "  (a model of your own in a loop of your own: atoll.found in Python)",
            "gpt-tiny",
            _model,
        ),
        SetupQuestion("data", "Which data? stdlib (Python's own sources), or a file or folder", "stdlib", _data),
        SetupQuestion(
            "link",
            "How do the machines reach each other? local (all on this computer), lan, or over the internet: then\n"
            "  the uplink of the slowest, such as 20Mbit",
            "lan",
            _link,
        ),
    )


def _answer(question: SetupQuestion, given: str, asks: bool) -> Any:
    """The checked answer: as given, else asked for until it is valid, else the usual one."""
    if given or not asks:
        try:
            return question.check(given or question.usual)
        except ValueError as why:
            fix = f"--{question.option} {question.usual}"
            raise UsageError("E-ARG-17", f"--{question.option} {given}: {why}", fix=fix) from None
    say(question.text)
    while True:
        try:
            said = input(f"[{question.usual}] ").strip() or question.usual
        except EOFError:
            raise KeyboardInterrupt from None
        try:
            value = question.check(said)
        except ValueError as why:
            say(f"  {why}")
        else:
            say()
            return value


def _machines(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= PEERS_MAX:
        raise ValueError(f"{text!r} is not a number of machines from 1 to {PEERS_MAX}")
    return int(text)


def _trust(before: Mapping[str, Any], text: str) -> str:
    from atoll.policy.presets import PRESETS

    if text not in PRESETS:
        raise ValueError(f"{text!r} is none of {', '.join(PRESETS)}")
    machines = before.get("machines", LIARS_FROM)
    if text != "private" and machines < LIARS_FROM:
        raise ValueError(f"{text} needs {LIARS_FROM} machines at least, and {machines} were named")
    return text


def _model(text: str) -> str:
    from atoll.training.models import spec_of

    spec_of(text)
    return text


def _data(text: str) -> str:
    if text == "stdlib":
        return text
    path = Path(text).expanduser()
    if not path.exists():
        raise ValueError(f"there is nothing at {path}")
    return str(path.resolve())


def _link(text: str) -> str:
    if text not in NEAR:
        parse_rate_bytes_s(text)
    return text


def run_toml(answers: RunAnswers, length: RunLength | None = None) -> str:
    """The file for these answers: what differs from the defaults, what the questions were about, and the length."""
    from atoll.peer.config.sections import toml_text

    slow = answers.link not in NEAR and parse_rate_bytes_s(answers.link) < FAST_BYTES_S
    # auto cannot be audited, which members that may lie need; diloco suits both
    recipe = "auto" if slow and answers.trust == "private" else "diloco"
    why = f"few bytes, for {answers.link}" if recipe == "auto" else "members agree after every round of steps"
    here = answers.link == "local"
    address = "/ip4/127.0.0.1/tcp/0" if here else f"/ip4/0.0.0.0/tcp/{PORT}"
    reached = "this computer only" if here else "other computers, too"
    lines = [
        ("# Written by atoll quickstart; atoll config --all explains every setting.", ""),
        ("[run]", ""),
        (f"start_peers = {answers.machines}", "training begins once this number of members is here"),
        *([(f"rounds = {length.rounds}", f"{length.steps} steps each; 0: until it is stopped")] if length else []),
        (f"trust = {toml_text(answers.trust)}", "which lies the run withstands"),
        ("[model]", ""),
        (f"name = {toml_text(answers.model)}", "atoll explain model.name lists all"),
        ("[data]", ""),
        (f"source = {toml_text(answers.data)}", "the others fetch it from members"),
        ("[train]", ""),
        (f"recipe = {toml_text(recipe)}", why),
        ("[network]", ""),
        (f"listen_addresses = {toml_text((address,))}", reached),
    ]
    written = [
        "\n" + text if text.startswith("[") else f"{text:<45} # {about}" if about else text for text, about in lines
    ]
    return "\n".join(written) + "\n"


def _length_of(text: str, file: Path) -> RunLength:
    """Length of a run with these settings. Raises the error that `atoll up` would end with. Imports torch."""
    import tomllib

    from atoll.peer.config.reading import decode_config
    from atoll.runtime.config import data_of, recipe_of, settings_of
    from atoll.training.models import task_of

    config = decode_config(tomllib.loads(text))
    data_of(config, file)
    if task_of(config.model.name) == "images" and config.data.source == "stdlib":
        raise UsageError(
            "E-ARG-17",
            f"{config.model.name} learns from images, and stdlib is text",
            cause="images come from this computer: a folder per class, .npz, or idx files",
            fix="--data PATH, or a gpt or llama model",
        )
    recipe = recipe_of(config)
    settings_of(config, recipe)
    return RunLength(recipe.schedule.rounds, recipe.schedule.inner_steps)


def _length_text(length: RunLength, file: Path) -> str:
    """How long the run trains, and how to change that."""
    rounds, steps = counted_text(length.rounds, "round"), counted_text(length.steps, "step")
    return (
        f"the run has {rounds} of {steps}, so each machine trains {length.rounds * length.steps:,} steps; "
        "atoll up shows the time that is left\n"
        f"for more or fewer rounds change `rounds` in {file} now, or in the running run: "
        f"atoll amend run.rounds={2 * length.rounds}\n"
    )


def commands_of(answers: RunAnswers, file: Path) -> list[tuple[str, str]]:
    """(place, command) for this machine and for the others."""
    up = f"atoll up {shlex.quote(str(file))}"
    if (folder_of(None) / "kept.sqlite").exists():  # another run lies in the default folder
        up += f" --dir {shlex.quote(str(file.with_suffix('')) + '-peer')}"
    found = [("here", up)]
    if answers.machines == 1:
        return found
    others = answers.machines - 1
    if answers.link == "local":
        each = f"in {counted_text(others, 'other terminal')}, each with a folder of its own"
        return [*found, (each, "atoll join TICKET --dir two")]
    many = f"on each of the {others} other machines" if others > 1 else "on the other machine"
    if answers.link != "lan":
        found[0] = (
            "here, with the address at which the internet reaches this machine (forward the port in the router)",
            f"{up} --announce /ip4/PUBLIC/tcp/{PORT}",
        )
    join = f"atoll join TICKET --listen /ip4/0.0.0.0/tcp/{PORT}"
    found += [
        (f"{many}, with the ticket that the first command prints", "atoll check TICKET"),
        ("then there", join),
    ]
    if answers.trust != "private" and others > 1:
        found.append(("a ticket admits one; make the others here", "atoll invite"))
    if answers.link != "lan":
        found.append(("a machine that others cannot dial joins with", "atoll join TICKET --role client"))
    return found
