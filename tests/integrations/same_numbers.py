"""Losses per step of each library with Atoll and of a plain loop without Atoll, as one line of JSON.

A run of one whose outer step takes the update as it is changes nothing: its rounds of 4 steps end where they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import atoll
from atoll.cli.main import main
from atoll.integrations.accelerate import attach
from atoll.integrations.lightning import AtollLightningCallback, ResumableLoader
from atoll.integrations.transformers import AtollCallback

STEPS, BATCH, PARTS, RATE = 12, 4, 2, 1e-2  # PARTS: batches whose gradients make one step
IDS = torch.randint(64, (STEPS * BATCH * PARTS, 16), generator=torch.Generator().manual_seed(1))
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
ROWS = [{"input_ids": row, "labels": row} for row in IDS]


def llama(lora: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=1))
    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear")) if lora else model


def one(name: str) -> atoll.Run:
    exact = atoll.RunOptions(outer_momentum=0.0, up="fp32", down="fp32")
    return atoll.found(rounds=STEPS // 4, inner_steps=4, folder=name, options=exact)


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0.1)


def plain(model: nn.Module, mixed: bool = False) -> list[float]:
    """No library and no Atoll."""
    losses, optimizer = list[float](), adam(model)
    rate = decay(optimizer)
    for batches in IDS.view(STEPS, PARTS, BATCH, 16):
        total = 0.0
        for ids in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                loss = model(input_ids=ids, labels=ids).loss / PARTS
            loss.backward()
            total += loss.item()
        losses.append(total)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
    return losses


def trainer(name: str, model: nn.Module, **settings: Any) -> list[float]:
    args = TrainingArguments(
        output_dir=f"{name}-out",
        **{"per_device_train_batch_size": BATCH, "gradient_accumulation_steps": PARTS, "num_train_epochs": 1},
        **{"learning_rate": RATE, "weight_decay": 0.1, "lr_scheduler_type": "linear", "max_grad_norm": 1.0},
        **{"logging_steps": 1, "save_strategy": "steps", "save_steps": 3, "train_sampling_strategy": "sequential"},
        **{"use_cpu": True, "report_to": "none", "disable_tqdm": True} | settings,
    )
    run, optimizer = one(name), adam(model)
    trained = Trainer(
        model, args, train_dataset=ROWS, callbacks=[AtollCallback(run)], optimizers=(optimizer, decay(optimizer))
    )
    trained.train()
    model.save_pretrained(f"{name}-saved")
    assert run.done and run.trained == STEPS // 4
    assert {path.name for path in Path(args.output_dir).iterdir()} == {f"checkpoint-{step}" for step in (4, 8, 12)}
    check_reloads(name, model, run.round)
    return [row["loss"] for row in trained.state.log_history if "loss" in row]


def check_reloads(name: str, model: nn.Module, round: int) -> None:
    """What the Trainer saved at its end and after the last round, and what Atoll exports, is the model."""
    if isinstance(model, PeftModel):
        places = [
            PeftModel.from_pretrained(llama(), place) for place in (f"{name}-saved", f"{name}-out/checkpoint-12")
        ]
    else:
        with pytest.raises(SystemExit) as ended:
            main(["checkpoint", "export", str(round), f"{name}-hf", "--hf", "--dir", name])
        assert not ended.value.code
        folders = (f"{name}-saved", f"{name}-out/checkpoint-12", f"{name}-hf")
        places = [AutoModelForCausalLM.from_pretrained(folder) for folder in folders]
    for loaded in places:
        assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in model.state_dict().items())


def lightning(name: str) -> list[float]:
    parts = list[float]()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.llama = llama()

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss = self.llama(**batch).loss
            parts.append(loss.item())
            return loss

        def configure_optimizers(self) -> tuple[list[Any], list[Any]]:
            optimizer = adam(self)
            return [optimizer], [{"scheduler": decay(optimizer), "interval": "step"}]

    run = one(name)
    settings: dict[str, Any] = {"accumulate_grad_batches": PARTS, "gradient_clip_val": 1.0, "accelerator": "cpu"}
    settings |= {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    pl.Trainer(max_epochs=9, callbacks=[AtollLightningCallback(run)], **settings).fit(
        Module(), ResumableLoader(ROWS, BATCH)
    )
    assert run.done and len(parts) == STEPS * PARTS
    return means(iter(parts))


def accelerate(name: str) -> list[float]:
    accelerator, parts, model = Accelerator(cpu=True, gradient_accumulation_steps=PARTS), list[float](), llama()
    optimizer = adam(model)
    rate = decay(optimizer)
    model, optimizer, data = accelerator.prepare(model, optimizer, DataLoader(ROWS, BATCH))
    run = attach(one(name), accelerator, model, optimizer, batch=BATCH)
    for batch in data:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            parts.append(loss.item())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                rate.step()
    assert run.done
    return means(iter(parts))


def means(parts: Iterator[float]) -> list[float]:
    return [sum(group) / PARTS for group in zip(*[parts] * PARTS, strict=True)]


CASES: dict[str, Callable[[str], list[float]]] = {
    "trainer": lambda name: trainer(name, llama()),
    "lora": lambda name: trainer(name, llama(lora=True)),
    "lightning": lightning,
    "accelerate": accelerate,
    "bf16": lambda name: trainer(name, llama(), bf16=True),  # last: Accelerate keeps the precision for the process
}

if __name__ == "__main__":
    losses = {"plain": plain(llama()), "plain lora": plain(llama(lora=True)), "plain bf16": plain(llama(), True)}
    losses |= {name: case(name) for name, case in CASES.items()}
    print("losses", json.dumps(losses))
