"""The command `atoll`: one file per verb, one table of them, and one place where trouble becomes words.

Exit status: 0 all is well, 2 the request is wrong, 3 nobody answered, 4 somebody said no, 5 the run broke; 130
after Ctrl-C. With `--json` trouble is an object on stderr too. Never imports torch: verbs that train start it.
"""

from __future__ import annotations

import os
import sys
import traceback
from io import TextIOWrapper

import cyclopts

from atoll import __version__
from atoll.base.errors import AtollError, RunFailedError, UsageError
from atoll.cli import (
    blame,
    checkpoint,
    demo,
    init,
    join,
    leave,
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

app = cyclopts.App(
    name="atoll",
    help="Train one PyTorch model together on many machines that nobody fully controls.",
    version=__version__,
    help_format="plaintext",
    default_parameter=cyclopts.Parameter(show_default=False),  # the help texts say them in words
)
for verb in (demo.demo, init.init, up.up, join.join, status.status, status.peers, status.invite):
    app.command(verb)
for verb in (leave.leave, leave.stop, leave.recover, status.export, plot.plot, simulate.simulate):
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


def main(tokens: list[str] | None = None) -> None:
    """Carry out one command and end the process with its exit status."""
    words = sys.argv[1:] if tokens is None else tokens
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
        traceback.print_exc()
        text = f"an error of Atoll itself: {type(why).__name__}: {why}"
        defect = RunFailedError(
            "E-INT-01", text, cause="a defect; the lines above say where", fix="report it with them"
        )
        status = say_trouble(defect, as_json="--json" in words)
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)
