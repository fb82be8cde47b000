"""Fine-tuning together: a frozen GPT that everybody has, low-rank adapters (LoRA) that are all that travels.

    python examples/lora.py --local 2                        two peers on this computer
    python examples/lora.py                                  founds a run and prints the ticket for others
    ATOLL_TICKET=ATOLL1:… ATOLL_DIR=two python examples/lora.py                 in another terminal
    python examples/lora.py --compare                        bytes per round beside the whole model, in one process

Between machines set ATOLL_LISTEN=/ip4/0.0.0.0/tcp/7071 on each of them. The base here is a GPT with the weights of
a seed, since nothing is downloaded; yours is a checkpoint that every member loads before `attach`. The text is
Python's standard library.
"""

import argparse

import torch
from torch import nn

import atoll
from atoll.training.data import batch, load_data, validation
from atoll.training.models import build_model, loss_of
from atoll.training.recipe.methods import diloco

MODEL, WINDOW = "gpt-tiny", 64


class Lora(nn.Module):
    """y = W x + B A x with W frozen (Hu et al. 2021, equation 3); B begins at zero, so nothing changes at first."""

    def __init__(self, inner: nn.Linear, rank: int) -> None:
        super().__init__()
        self.inner = inner
        self.lora_a = nn.Parameter(torch.randn(rank, inner.in_features) * inner.in_features**-0.5)
        self.lora_b = nn.Parameter(torch.zeros(inner.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + x @ self.lora_a.T @ self.lora_b.T


def adapted(rank: int) -> nn.Module:
    """The base, frozen, with adapters beside every linear layer."""
    torch.manual_seed(0)
    model = build_model(MODEL, seed=0).requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Lora(child, rank))
    return model


def compare(rank: int, peers: int) -> None:
    recipe = diloco(MODEL, rounds=2, inner_steps=10)
    parts: list[tuple[str, nn.Module]] = [("whole", build_model(MODEL, seed=0)), ("adapters", adapted(rank))]
    for name, model in parts:
        done = atoll.experiment(recipe, model, "stdlib", peers=peers, samples=64)
        sent = done.upload_bytes / done.rounds
        print(f"{name:<9} {done.model_F.numel():>8,} values exchanged, {sent:>9,.0f} bytes sent per round and peer")


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--local", type=int, default=0, help="run so many peers on this computer")
    asked.add_argument("--compare", action="store_true")
    asked.add_argument("--rank", type=int, default=4)
    asked.add_argument("--rounds", type=int, default=6)
    asked.add_argument("--inner-steps", type=int, default=20)
    asked.add_argument("--folder", default="")
    options = asked.parse_args()
    torch.set_num_threads(1)
    if options.compare:
        return compare(options.rank, peers=4)
    if options.local:
        own = ["--rank", options.rank, "--rounds", options.rounds, "--inner-steps", options.inner_steps]
        return atoll.local(__file__, *map(str, own), peers=options.local, folder=options.folder)

    model, data = adapted(options.rank), load_data("stdlib")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    run = atoll.join(or_found={"rounds": options.rounds, "inner_steps": options.inner_steps})
    run.attach(model, optimizer, batch=4)  # what requires no gradient stays at home

    cursor = 0
    while not run.done:
        loss = loss_of(model, batch(data, run.shard_index, run.shard_count, cursor, 4, WINDOW, seed=0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.report(loss.item())
        cursor += 4

    with torch.no_grad():
        losses = [loss_of(model, one).item() for one in validation(data, 64, 16, WINDOW)]
    whole = sum(p.numel() for p in model.parameters())
    print(
        f"peer {run.peer[-8:]}: {run.trained} rounds with {run.members} members, {run.exchanged:,} of {whole:,} "
        f"values exchanged, base {run.base[:8]}, validation loss {sum(losses) / len(losses):.4f}"
    )
    run.close()


if __name__ == "__main__":
    main()
