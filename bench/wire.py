"""Bytes on the sockets of a real run, beside what `atoll plan` says of its tensors: votes, headers, all of it.

    python bench/wire.py [--recipes auto muloco] [--model gpt-10m] [--peers 2] [--rounds 4] [--quick] [--json]

One row per recipe: real peers on this computer (`atoll demo`), a batch of one, rounds as the recipe has them.
`wire_ratio` is what ring data parallelism in fp32 would have sent for the same steps over what all sockets sent, by
their own counters, from the first handshake to the last farewell; `upload_ratio` is the plan's, tensors only. With
few rounds the founding and the last states weigh; below some million parameters so do signatures and frames.
Losses mean nothing here: the model is too large for so few steps.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from form import asking, report, versions

RECIPES = ("auto", "streaming", "muloco")
QUICK_MODEL = "gpt-small"
ROUNDS = 4


def asked_json(words: list[str]) -> dict[str, Any]:
    """What `atoll WORDS --json` says. A demo whose loss stays high has a status of its own, and its figures."""
    done = subprocess.run([sys.executable, "-m", "atoll", *words, "--json"], stdout=subprocess.PIPE, check=False)
    return json.loads(done.stdout)


def measured(recipe: str, model: str, peers: int, rounds: int) -> dict[str, Any]:
    plan = asked_json(["plan", "--model", model, "--peers", str(peers), "--uplink", "100Mbit"])
    forecast = next(row for row in plan["recipes"] if row["recipe"] == recipe)
    sets = f"model.name={model}", f"train.recipe={recipe}", "train.batch=1"
    words = [word for text in sets for word in ("--set", text)]
    figures = asked_json(["demo", "--peers", str(peers), "--rounds", str(rounds), *words])["figures"]
    return {
        "recipe": recipe,
        "model": model,
        "parameters": plan["parameters"],
        "peers": peers,
        "rounds": figures["rounds"],
        "wire_ratio": round(figures["bytes_data_parallel"] / figures["bytes_sent"], 1),
        "upload_ratio": round(forecast["up_ratio"], 1),
        "state_hashes_equal": figures["state_hashes_equal"],
    }


def main() -> None:
    arguments = asking(__doc__, f"{QUICK_MODEL} and two rounds of the first recipe")
    arguments.add_argument("--recipes", nargs="+", default=RECIPES)
    arguments.add_argument("--model", default="gpt-10m")
    arguments.add_argument("--peers", type=int, default=2)
    arguments.add_argument("--rounds", type=int, default=ROUNDS)
    asked = arguments.parse_args()
    if asked.quick:
        asked.recipes, asked.model, asked.rounds = asked.recipes[:1], QUICK_MODEL, 2
    rows = []
    for recipe in asked.recipes:
        rows.append(measured(recipe, asked.model, asked.peers, asked.rounds))
        if asked.json:
            continue
        if len(rows) == 1:
            print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
        print("| " + " | ".join(map(str, rows[-1].values())) + " |", flush=True)
    if asked.json:
        print(report("wire", {"quick": asked.quick}, rows, versions("torch")))


if __name__ == "__main__":
    main()
