"""A loop of Accelerate as a member of a run: a small network learns which of its inputs is the largest.

    ATOLL_START_PEERS=2 python examples/accelerate_loop.py                     founds a run of two; prints a ticket
    ATOLL_TICKET=ATOLL1:… ATOLL_DIR=two python examples/accelerate_loop.py     another member, in another terminal

Needs `pip install accelerate` (extra `accelerate`). The same command goes on after a crash, at the next batch.
"""

import os
import zlib

import torch
from accelerate import Accelerator, skip_first_batches

import atoll
from atoll.integrations.accelerate import attach, load_state, save_state

FOLDER, ROUNDS = os.environ.get("ATOLL_DIR", "atoll-run"), int(os.environ.get("ROUNDS", "8"))

torch.manual_seed(0)
accelerator, draw = Accelerator(cpu=True), torch.Generator().manual_seed(zlib.crc32(FOLDER.encode()))
net = torch.nn.Sequential(torch.nn.Linear(32, 96), torch.nn.ReLU(), torch.nn.Linear(96, 32))
adam, loader = torch.optim.AdamW(net.parameters(), lr=1e-2), torch.randn(256, 32, generator=draw)
model, optimizer, data = accelerator.prepare(net, adam, torch.utils.data.DataLoader(loader, batch_size=8))
step = load_state(accelerator, f"{FOLDER}-state")
run = attach(atoll.join(or_found={"rounds": ROUNDS, "inner_steps": 5}), accelerator, model, optimizer, batch=8)
while not run.done:
    for x in skip_first_batches(data, step % len(data)):
        loss, before, step = torch.nn.functional.cross_entropy(model(x), x.argmax(1)), run.round, step + 1
        print(f"step {step} loss {loss.item():.9f}", flush=True)
        accelerator.backward(loss)
        run.report(loss)
        optimizer.step()
        optimizer.zero_grad()
        if run.round != before:
            save_state(accelerator, f"{FOLDER}-state", step)
        if run.done:
            break
torch.save(accelerator.unwrap_model(model).state_dict(), f"{FOLDER}-model.pt")
run.close()
