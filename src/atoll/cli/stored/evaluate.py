"""`atoll evaluate`: measures the newest agreed state while the run trains, in this process. Imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from atoll.base.errors import UsageError
from atoll.base.units import history_round_text
from atoll.cli.say import AsJson, Dir, folder_of, say, say_json
from atoll.cli.stored.publish import Once

EVERY, SAMPLES, LENGTH = 5, 512, 64  # rounds, samples, tokens
Whole = Number(gte=0)


def evaluate(
    dir: Dir = None,
    *,
    every: Annotated[
        int, Parameter(validator=Number(gte=1), help=f"Rounds between two evaluations. Default: {EVERY}.")
    ] = EVERY,
    samples: Annotated[
        int, Parameter(validator=Number(gte=1), help=f"Held-out samples, the same every time. Default: {SAMPLES}.")
    ] = SAMPLES,
    prompt: Annotated[str, Parameter(help="Text that a language model continues. Default: a new line.")] = "",
    length: Annotated[
        int, Parameter(validator=Whole, help=f"Tokens of the text sample; 0: none. Default: {LENGTH}.")
    ] = LENGTH,
    data: Annotated[
        Path | None, Parameter(help="Held-out data of your own, in the form of the run's. Default: the run's.")
    ] = None,
    threads: Annotated[
        int, Parameter(validator=Number(gte=1), help="Threads; the trainer needs the others. Default: 1.")
    ] = 1,
    once: Once = False,
    json: AsJson = False,
) -> None:
    """Measure held-out loss, accuracy and a text sample of the newest agreed state, while the run trains.

    It follows the peer of the folder, a member or an observer, until that ends. Findings are facts in the folder's
    facts.jsonl: atoll watch, status and plot show them.
    """
    from atoll.runtime.evaluation.evaluator import CheckpointEvaluator
    from atoll.runtime.evaluation.facts import evaluation_text, record_evaluation
    from atoll.runtime.publishing.checkpoints import follow_checkpoints

    folder, found, evaluator = folder_of(dir), list[dict[str, Any]](), None
    source = str(data.expanduser()) if data is not None else ""
    for checkpoint in follow_checkpoints(folder, every, once=once):
        evaluator = evaluator or CheckpointEvaluator(folder, source, threads)
        try:
            entry = record_evaluation(folder, evaluator.evaluate(checkpoint, samples, prompt, length))
        except FileNotFoundError:
            continue  # the peer removed the state meanwhile: a newer one follows
        except ValueError as why:
            raise UsageError(
                "E-EVA-04",
                f"{history_round_text(checkpoint.body.round, checkpoint.body.trained)} cannot be evaluated: {why}",
                fix="for a text sample: pip install tokenizers, or --length 0; for too short data: --data PATH",
            ) from None
        found.append(entry)
        if not json:
            say(evaluation_text(entry))
    if json:
        say_json({"folder": str(folder), "evaluations": found})
