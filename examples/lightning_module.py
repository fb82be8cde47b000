"""A Lightning Trainer as a member of a run: a small network learns which of its inputs is the largest.

    ATOLL_START_PEERS=2 python examples/lightning_module.py                    founds a run of two; prints a ticket
    ATOLL_TICKET=ATOLL1:… ATOLL_DIR=two python examples/lightning_module.py    another member, in another terminal

Needs `pip install pytorch-lightning` (extra `lightning`). The same command goes on after a crash, at the next step.
"""

import os
import zlib

import pytorch_lightning as pl
import torch

import atoll
from atoll.integrations.lightning import AtollLightningCallback, ResumableLoader

FOLDER, ROUNDS = os.environ.get("ATOLL_DIR", "atoll-run"), int(os.environ.get("ROUNDS", "8"))


class Largest(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, 96), torch.nn.ReLU(), torch.nn.Linear(96, 32))

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.layers(x), x.argmax(1))
        print(f"step {self.global_step + 1} loss {loss.item():.9f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


torch.manual_seed(0)
model, draw, last = Largest(), torch.Generator().manual_seed(zlib.crc32(FOLDER.encode())), f"{FOLDER}.ckpt"
data = ResumableLoader(torch.randn(256, 32, generator=draw), batch_size=8, shuffle=True)
member = AtollLightningCallback(atoll.join(or_found={"rounds": ROUNDS, "inner_steps": 5}), checkpoint=last)
trainer = pl.Trainer(max_epochs=-1, accelerator="cpu", callbacks=[member], logger=False, enable_checkpointing=False)
trainer.fit(model, data, ckpt_path=last if os.path.exists(last) else None)
