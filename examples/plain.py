"""A plain PyTorch loop as a member of a run: a small network learns which of its inputs is the largest.

    ATOLL_START_PEERS=2 python examples/plain.py                     founds a run of two; prints a ticket
    ATOLL_TICKET=ATOLL1:… ATOLL_DIR=two python examples/plain.py     another member, in another terminal

On one computer, start both with OMP_NUM_THREADS=1. The same command goes on after a crash: the model comes from the
run's folder, the optimizer and the place in the data from the file beside it, which each agreed round replaces.
"""

import os
import zlib

import torch

import atoll

FOLDER, ROUNDS = os.environ.get("ATOLL_DIR", "atoll-run"), int(os.environ.get("ROUNDS", "8"))
LAST = f"{FOLDER}.pt"

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 96), torch.nn.ReLU(), torch.nn.Linear(96, 32))
optimizer, step = torch.optim.AdamW(model.parameters(), lr=1e-2), 0
batches = torch.randn(32, 8, 32, generator=torch.Generator().manual_seed(zlib.crc32(FOLDER.encode())))
if os.path.exists(LAST):
    saved = torch.load(LAST)
    step, _ = saved["step"], optimizer.load_state_dict(saved["optimizer"])
run = atoll.join(or_found={"rounds": ROUNDS, "inner_steps": 5}).attach(model, optimizer, batch=8)
while not run.done:
    x, before, step = batches[step % 32], run.round, step + 1
    loss = torch.nn.functional.cross_entropy(model(x), x.argmax(1))
    print(f"step {step} loss {loss.item():.9f}", flush=True)
    loss.backward()
    run.report(loss)
    optimizer.step()
    optimizer.zero_grad()
    if run.round != before:
        torch.save({"step": step, "optimizer": optimizer.state_dict()}, f"{LAST}.tmp")
        os.replace(f"{LAST}.tmp", LAST)
torch.save(model.state_dict(), f"{FOLDER}-model.pt")
run.close()
