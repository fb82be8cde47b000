"""The command `atoll`: one file per verb, one table of them, and one place where trouble becomes words.

Exit status: 0 all is well, 2 the request is wrong, 3 nobody answered, 4 somebody said no, 5 the run broke; 130
after Ctrl-C. With `--json` trouble is an object on stderr too. Never imports torch: verbs that train start it.
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

from atoll import __version__
from atoll.base.errors import AtollError, RunFailedError, UsageError
from atoll.cli import (
    amend,
    blame,
    checkpoint,
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
from atoll.cli.say import say_trouble

SETTING = re.compile(r"[a-z]+\.\w+=")


def _exact(kind: Any, tokens: Sequence[cyclopts.Token]) -> Any:
    """As cyclopts reads them, but for a fraction where a whole number is meant, which it would round."""
    if kind is int and "." in tokens[0].value:
        raise ValueError(f"{tokens[0].value} is not a whole number")
    return cyclopts.convert(kind, tokens)


def _each_by_itself(words: list[str]) -> list[str]:
    """`--set a.b=1 c.d=2` as `--set a.b=1 --set c.d=2`: cyclopts would take the run.toml behind them, too."""
    each = list[str]()
    for word in words:
        behind = each[-2:-1] == ["--set"] or "".join(each[-1:]).startswith("--set=")
        each += ["--set", word] if behind and SETTING.match(word) else [word]
    return each


app = cyclopts.App(
    name="atoll",
    help="Train one PyTorch model together on many machines that nobody fully controls.",
    version=__version__,
    help_format="plaintext",
    default_parameter=cyclopts.Parameter(show_default=False, converter=_exact),  # the help texts say them in words
)
for verb in (demo.demo, init.init, up.up, join.join, status.status, status.peers, status.invite):
    app.command(verb)
for verb in (leave.leave, leave.stop, leave.recover, status.export, plot.plot, simulate.simulate):
    app.command(verb)
for verb in (pause.pause, pause.resume, amend.amend):
    app.command(verb)
for verb in (plan.plan, verify.verify, checkpoint.checkpoint, blame.blame):
    app.command(verb)
for verb in (pull.pull, rollback.rollback, verify.verify):
    checkpoint.checkpoint.command(verb)


def _verbs(words: list[str]) -> list[str]:
    """The command that these words begin with: `status`, or `checkpoint show`; nothing if there is none."""
    at, verbs = app, list[str]()
    for word in words:
        if word.startswith("-") or word not in at:
            break
        verbs.append(word)
        at = at[word]
    return verbs


def _dash_last(words: list[str]) -> list[str]:
    """`join - --name ada` as `join --name ada -- -`: cyclopts would take `-`, standard input, for an option."""
    if "-" not in words or "--" in words or _verbs(words)[-1:] not in (["join"], ["pull"]):
        return words
    return [*(word for word in words if word != "-"), "--", "-"]


SLIPS = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EEXIST}
SLIPS |= {errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS}  # of whoever named a file; others are no fault of the name


def _of_a_file(why: OSError) -> UsageError:
    """What a file or a folder that a command was given has against it."""
    return UsageError(
        "E-ARG-12",
        f"{why.filename!s:.200}: {why.strerror}",
        cause="a folder where a file is meant, or a file where a folder is, a place that is not yours, a slip",
        fix=f"ls -ld {shlex.quote(str(why.filename))} says what it is; then name another one",
    )


def main(tokens: list[str] | None = None) -> None:
    """Carry out one command and end the process with its exit status."""
    words = _dash_last(_each_by_itself(sys.argv[1:] if tokens is None else tokens))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 gets question marks
    try:
        answer = app(words, exit_on_error=False, print_error=False, result_action="return_value")
        status = answer if isinstance(answer, int) else 0
    except AtollError as why:
        status = say_trouble(why, as_json="--json" in words)
    except cyclopts.CycloptsError as why:
        told = UsageError("E-ARG-01", str(why).strip(), fix=" ".join(["atoll", *_verbs(words), "--help"]))
        status = say_trouble(told, as_json="--json" in words)
    except BrokenPipeError:  # whoever read us has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor is it told at exit
        status = 0
    except Exception as why:
        if isinstance(why, OSError) and why.filename is not None and why.errno in SLIPS:
            sys.exit(say_trouble(_of_a_file(why), as_json="--json" in words))
        traceback.print_exc()
        text = f"an error of Atoll itself: {type(why).__name__}: {why}"
        defect = RunFailedError(
            "E-INT-01", text, cause="a defect; the lines above say where", fix="report it with them"
        )
        status = say_trouble(defect, as_json="--json" in words)
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)
