"""Federated averaging among hospitals: pictures never leave their hospital, and a part of them trains per round.

    python examples/federated.py                    in one process first: twelve hospitals, six of them per round
    python examples/federated.py --local 4          then four real peers on this computer, two of them per round
    python examples/federated.py --hospital 0                             or founds a run and prints the ticket
    ATOLL_TICKET=ATOLL1:… ATOLL_DIR=three python examples/federated.py --hospital 3      another one joins it

Between machines set ATOLL_LISTEN=/ip4/0.0.0.0/tcp/7071 on each of them.
The pictures are made up here: four kinds of finding, of which each hospital sees two often and two hardly ever, and
hospitals have between 150 and 450 of them. Two scanners of one hospital are one group: they share its turns.
"""

import argparse
import os

import numpy as np
import torch
from torch import nn

import atoll
from atoll.training.data import ImageDataset
from atoll.training.recipe.methods import fedavg

KINDS, SIDE, BATCH, LR = 4, 12, 16, 0.2
STEPS_MOST = 40  # of a round: a pass of the largest hospital takes 29
SHAPES = np.random.Generator(np.random.PCG64(1)).integers(0, 200, (KINDS, SIDE, SIDE))  # what findings look like


def pictures(draw: np.random.Generator, count: int, chances: list[float]) -> tuple[np.ndarray, np.ndarray]:
    labels = draw.choice(KINDS, count, p=chances).astype(np.uint8)
    noise = draw.integers(-120, 120, (count, SIDE, SIDE))
    return np.clip(SHAPES[labels] + noise, 0, 255).astype(np.uint8), labels


def hospital(number: int) -> ImageDataset:
    """Its own pictures, and the same held-out ones for everybody."""
    often = {number % KINDS, (number + 1) % KINDS}
    chances = [0.45 if kind in often else 0.05 for kind in range(KINDS)]
    own = pictures(np.random.Generator(np.random.PCG64(100 + number)), 150 + 100 * (number % 4), chances)
    return ImageDataset(*own, *pictures(np.random.Generator(np.random.PCG64(2)), 400, [1 / KINDS] * KINDS))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 64), nn.ReLU(), nn.Linear(64, KINDS))


def group(number: int) -> str:
    """Peers 0 and 1 are two scanners of one hospital."""
    return "hospital-a" if number < 2 else f"hospital-{number}"


def rehearse(rounds: int) -> None:
    """No network: what the recipe reaches, and who came to how many turns."""
    recipe = fedavg(rounds=rounds, inner_steps=STEPS_MOST, epochs=1, batch=BATCH, lr=LR)
    numbers = range(12)
    data, groups = [hospital(n) for n in numbers], [group(n) for n in numbers]
    done = atoll.experiment(
        recipe, network(), data, peers=12, options=atoll.ExperimentOptions(sample=0.5, groups=groups)
    )
    turns = [sum(n in one.counted for one in done.history) for n in numbers]
    print(f"validation loss {done.val_loss:.3f} after {done.rounds} rounds; turns of every peer: {turns}")


def take_part(number: int, rounds: int, peers: int) -> None:
    data = hospital(number)
    inputs, labels = torch.from_numpy(data.train_images).float() / 255, torch.from_numpy(data.train_labels).long()
    passes = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), BATCH, shuffle=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    averaging = {"outer_momentum": 0.0, "up": "fp32", "down": "fp32"}
    options = atoll.RunOptions(epochs=1, sample_peers=max(1, peers // 2), **averaging)
    wish = {"rounds": rounds, "inner_steps": STEPS_MOST, "options": options}
    run = atoll.join(group=group(number), or_found=wish)
    run.attach(model, optimizer, batch=BATCH, pass_steps=len(passes))
    while not run.done:
        for x, y in passes:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # between two rounds this waits until this hospital is drawn again
            run.report(loss.item())
            if run.done:
                break
    seen, truth = torch.from_numpy(data.validation_images).float() / 255, torch.from_numpy(data.validation_labels)
    with torch.no_grad():
        right = float((model(seen).argmax(1) == truth).float().mean())
    print(f"hospital {number}: {right:.1%} of the held-out pictures right after {run.trained} rounds", flush=True)
    run.close()


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--local", type=int, default=0, help="run so many peers on this computer")
    asked.add_argument("--hospital", type=int, default=-1, help="whose pictures this peer has")
    asked.add_argument("--peers", type=int, default=2, help="of a run to found: half of them train in a round")
    asked.add_argument("--rounds", type=int, default=12)
    options = asked.parse_args()
    torch.set_num_threads(1)
    here = os.environ.get("ATOLL_NAME", "")
    if options.local:
        words = ("--peers", str(options.local), "--rounds", str(options.rounds))
        atoll.local(__file__, *words, peers=options.local)
    elif options.hospital >= 0 or here:
        number = options.hospital if options.hospital >= 0 else int(here.rpartition("-")[2]) - 1
        take_part(number, options.rounds, options.peers)
    else:
        rehearse(options.rounds)


if __name__ == "__main__":
    main()
