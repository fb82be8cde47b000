"""The command `atoll`: one file per verb, one table of verbs, one place that prints errors.

Exit status: 0 success, 2 wrong request, 3 no peer answered, 4 refused, 5 the run broke; 130 after Ctrl-C. With
`--json` an error is an object on stderr. Never imports torch: verbs that train start a trainer process.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import sys
import traceback
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Any

import cyclopts

from atoll.base.errors import AtollError, RunFailedError, UsageError
from atoll.base.ids import TICKET, without_tickets
from atoll.cli import (
    amend,
    blame,
    checkpoint,
    config,
    demo,
    init,
    join,
    leave,
    pause,
    plan,
    plot,
    pull,
    rollback,
    simulate,
    status,
    up,
    verify,
)
from atoll.cli.assist import check, explain, quickstart, version
from atoll.cli.display import follow
from atoll.cli.say import say_trouble
from atoll.cli.stored import evaluate, publish
from atoll.runtime.system import check_system

EXIT_STATUSES = """Exit status: 0 success, 2 wrong request, 3 no peer answered, 4 refused,
5 the run failed, 130 Ctrl-C. Let a service restart after 3 and 5 only.
Every error has a code: atoll explain E-NET-01 explains it."""
EXAMPLES = {  # of commands that need more than their name
    "atoll plan": "atoll plan --model gpt-small --peers 8 --uplink 20Mbit",
    "atoll explain": "atoll explain E-NET-01",
}
SETTING = re.compile(r"[a-z]+\.\w+=")


def _exact(kind: Any, tokens: Sequence[cyclopts.Token]) -> Any:
    """Convert as cyclopts does, but refuse a fraction for a whole number, which it would round."""
    if kind is int and "." in tokens[0].value:
        raise ValueError(f"{tokens[0].value} is not a whole number")
    return cyclopts.convert(kind, tokens)


def _each_by_itself(words: list[str]) -> list[str]:
    """Turn `--set a.b=1 c.d=2` into `--set a.b=1 --set c.d=2`: cyclopts would also take a run.toml behind them."""
    each = list[str]()
    for word in words:
        behind = each[-2:-1] == ["--set"] or "".join(each[-1:]).startswith("--set=")
        each += ["--set", word] if behind and SETTING.match(word) else [word]
    return each


app = cyclopts.App(
    name="atoll",
    help="Train one PyTorch model together on many machines that do not trust each other.",
    version=version.version_text,
    help_format="plaintext",
    help_epilogue=EXIT_STATUSES,
    default_parameter=cyclopts.Parameter(show_default=False, converter=_exact),  # the help texts name the defaults
)
GROUPS = {  # panels of `atoll --help`, in this order
    "Begin": (demo.demo, quickstart.quickstart, init.init, config.config, plan.plan, check.check),
    "Run": (up.up, join.join, status.status, follow.watch, pause.pause, pause.resume, amend.amend, leave.recover),
    "Peer": (status.peers, status.invite, leave.leave, leave.stop),
    "Checkpoint": (checkpoint.checkpoint, status.export, publish.publish),
    "History": (verify.verify, blame.blame, plot.plot, evaluate.evaluate),
    "Help and experiments": (explain.explain, init.docs, version.version, simulate.simulate),
}
for order, (title, verbs) in enumerate(GROUPS.items()):
    panel = cyclopts.Group(title, sort_key=order)
    for verb in verbs:
        if isinstance(verb, cyclopts.App):
            verb.group, verb.help_epilogue = (panel,), ""
            app.command(verb)
        else:
            app.command(verb, group=panel, help_epilogue="")
app.register_install_completion_command(add_to_startup=False, group=panel, help_epilogue="")
for option in ("--help", "--version"):
    app[option].group = panel
for verb in (pull.pull, rollback.rollback, verify.verify):
    checkpoint.checkpoint.command(verb)


def _verbs(words: list[str]) -> list[str]:
    """Verb at the start of these words: `status`, or `checkpoint show`; empty if there is none."""
    at, verbs = app, list[str]()
    for word in words:
        if word.startswith("-") or word not in at:
            break
        verbs.append(word)
        at = at[word]
    return verbs


def _dash_last(words: list[str]) -> list[str]:
    """Turn `join - --name ada` into `join --name ada -- -`: cyclopts takes `-` (standard input) for an option."""
    if "-" not in words or "--" in words or _verbs(words)[-1:] not in (["join"], ["pull"], ["check"]):
        return words
    return [*(word for word in words if word != "-"), "--", "-"]


SLIPS = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EEXIST}
# errors about a file that the user named; other errors do not depend on the name
SLIPS |= {errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS}


def _of_a_file(why: OSError) -> UsageError:
    """Error about a file or folder that was passed to a command."""
    if ticket := TICKET.search(str(why.filename)):
        return UsageError(
            "E-ARG-21",
            f"{ticket[0]} is a ticket, and the command expects a file or folder in its place",
            fix="atoll join TICKET joins its run; atoll join --ticket-file FILE reads a ticket from a file",
        )
    return UsageError(
        "E-ARG-12",
        f"{why.filename!s:.200}: {why.strerror}",
        cause="a folder in place of a file, a file in place of a folder, another user's place, or a typo",
        fix=f"ls -ld {shlex.quote(str(why.filename))} shows what it is; then name another one",
    )


def _is_json(words: list[str]) -> bool:
    """True if errors are printed as objects: with --json, and where a peer logs in JSON."""
    said = " ".join(words).replace("--log-format=", "--log-format ")
    logs = words[:1] in (["up"], ["join"], ["watch"]) and os.environ.get("ATOLL_LOG_FORMAT") == "json"
    return "--json" in words or "--log-format json" in said or (logs and "--log-format" not in said)


def main(tokens: list[str] | None = None) -> None:
    """Run one command and end the process with its exit status."""
    words = _dash_last(_each_by_itself(sys.argv[1:] if tokens is None else tokens))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 gets question marks
    try:
        check_system()
        answer = app(words, exit_on_error=False, print_error=False, result_action="return_value")
        status = answer if isinstance(answer, int) else 0
    except AtollError as why:
        status = say_trouble(why, as_json=_is_json(words))
    except cyclopts.CycloptsError as why:
        verbs = " ".join(["atoll", *_verbs(words)])
        example = f"{EXAMPLES[verbs]}; " if verbs in EXAMPLES else ""
        told = UsageError("E-ARG-01", str(why).strip(), fix=f"{example}{verbs} --help")
        status = say_trouble(told, as_json=_is_json(words))
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # no second error at exit
        status = 0
    except Exception as why:
        if isinstance(why, OSError) and why.filename is not None and why.errno in SLIPS:
            sys.exit(say_trouble(_of_a_file(why), as_json=_is_json(words)))
        sys.stderr.write(without_tickets(traceback.format_exc()))
        text = f"an error of Atoll itself: {type(why).__name__}: {why}"
        defect = RunFailedError(
            "E-INT-01", text, cause="a defect; the lines above say where", fix="report it with them"
        )
        status = say_trouble(defect, as_json=_is_json(words))
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)
