"""MNIST in a plain PyTorch loop, together with others: the two lines that Atoll adds are marked.

    python examples/mnist.py mnist.npz --local 4             four peers on this computer
    python examples/mnist.py mnist.npz                       founds a run and prints the ticket for others
    ATOLL_TICKET=ATOLL1:… ATOLL_DIR=two python examples/mnist.py mnist.npz      in another terminal

Between machines set ATOLL_LISTEN=/ip4/0.0.0.0/tcp/7071 on each of them. `mnist.npz` holds x_train, y_train, x_test,
y_test (uint8), as Keras distributes it (IMAGES says where). The rate follows the agreed rounds, so a member that
joins late has the rate of the others.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from torch import nn

import atoll

IMAGES = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz"


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def images(pixels: np.ndarray) -> torch.Tensor:
    return (torch.from_numpy(pixels).float() / 255 - 0.1307)[:, None] / 0.3081


@torch.no_grad()
def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    parts = zip(x.split(500), y.split(500), strict=True)
    return sum(int((model(inputs).argmax(1) == labels).sum()) for inputs, labels in parts) / len(y)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("data", type=Path)
    asked.add_argument("--local", type=int, default=0, help="run so many peers on this computer")
    asked.add_argument("--rounds", type=int, default=20)
    asked.add_argument("--inner-steps", type=int, default=50)
    asked.add_argument("--batch", type=int, default=32)
    asked.add_argument("--threads", type=int, default=1)
    asked.add_argument("--every", type=int, default=5, help="rounds between two lines of accuracy")
    options = asked.parse_args()
    if not options.data.is_file():
        asked.error(f"there is no {options.data}; {IMAGES} is one")
    if options.local:
        names = ("rounds", "inner_steps", "batch", "every")
        own = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
        atoll.local(__file__, str(options.data), *own, peers=options.local)
        return

    torch.set_num_threads(options.threads)
    data = np.load(options.data)
    x_train, y_train = images(data["x_train"]), torch.from_numpy(data["y_train"]).long()
    x_test, y_test = images(data["x_test"]), torch.from_numpy(data["y_test"]).long()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    run = atoll.join(or_found={"rounds": options.rounds, "inner_steps": options.inner_steps})  # 1
    run.attach(model, optimizer, batch=options.batch)  # 2
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda _: (1 + math.cos(math.pi * run.trained / options.rounds)) / 2
    )
    # the same seed at every peer: `shard` then gives disjoint batches
    shuffle, told = torch.Generator().manual_seed(0), 0
    while not run.done:
        order = torch.randperm(len(x_train), generator=shuffle).split(options.batch)
        for index in run.shard(order):
            loss = nn.functional.cross_entropy(model(x_train[index]), y_train[index])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            run.report(loss.item())
            if run.done:
                break
            if run.shard_index == 0 and run.trained != told and run.trained % options.every == 0:
                told = run.trained  # the model holds the agreed parameters of this round, the same at all members
                print(f"round {told}: accuracy {accuracy(model, x_test, y_test):.4f}", flush=True)

    right = accuracy(model, x_test, y_test)
    print(f"peer {run.peer[-8:]}: {run.trained} rounds with {run.members} members, test accuracy {right:.4f}")
    run.close()


if __name__ == "__main__":
    main()
