"""A transformers.Trainer as a member of a run: a Llama of random weights learns to count.

    ATOLL_START_PEERS=2 python examples/trainer.py                       founds a run of two; prints a ticket
    ATOLL_TICKET=ATOLL1:… ATOLL_DIR=two python examples/trainer.py       another member, in another terminal

Needs `pip install transformers accelerate` (extra `transformers`). On one computer: OMP_NUM_THREADS=1 for both. The
same command goes on after a crash, from the run's folder and the last checkpoint. All leave the same model.
"""

import os
import zlib

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import atoll
from atoll.integrations.transformers import AtollCallback, last_checkpoint

FOLDER, ROUNDS = os.environ.get("ATOLL_DIR", "atoll-run"), int(os.environ.get("ROUNDS", "8"))
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


class Counting(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(16) * (1 + index % 5) + index + zlib.crc32(FOLDER.encode())) % 64
        return {"input_ids": ids, "labels": ids}


if __name__ == "__main__":
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=1))
    run = atoll.join(or_found={"rounds": ROUNDS, "inner_steps": 5})
    places = {"output_dir": f"{FOLDER}-trainer", "save_total_limit": 2, "use_cpu": True, "disable_tqdm": True}
    args = TrainingArguments(max_steps=ROUNDS * 5, learning_rate=1e-2, logging_steps=1, report_to="none", **places)
    trainer = Trainer(model, args, train_dataset=Counting(), callbacks=[AtollCallback(run, save_rounds=1)])
    trainer.train(resume_from_checkpoint=last_checkpoint(args.output_dir))
    model.save_pretrained(f"{FOLDER}-model")
