"""A tiny Llama that has learned a text with structure, and what it writes greedily.

The next token is a function of the last two: the one before the last chooses one of three
permutations, the last one is looked up in it. A tenth of the tokens are random instead.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headstart.calibrate.tokenizer import tokenizer_documents
from headstart.data.records import Record
from support.training_data import record, write_data

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

VOCAB, CLASSES, NOISE = 34, 3, 0.1
PROMPT, ANSWER = 6, 20


def write_model(out: Path, *, steps: int = 150) -> LlamaForCausalLM:
    """Train the trunk and write it; returns it for writing answers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCAB, max_position_embeddings=64, bos_token_id=0,
        eos_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 6e-3 * (1 - step / steps)
        ids = texts(64, 16)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval().save_pretrained(out)
    for name, document in tokenizer_documents(
        json.loads((out / "config.json").read_text())
    ).items():
        (out / name).write_text(document)
    return model


def texts(count: int, length: int) -> torch.Tensor:
    """[count, length] of the source."""
    table = torch.stack(
        [
            torch.randperm(VOCAB - 2, generator=torch.Generator().manual_seed(c)) + 2
            for c in range(CLASSES)
        ]
    )
    columns = [torch.randint(2, VOCAB, (count,)) for _ in range(2)]
    while len(columns) < length:
        follows = table[columns[-2] % CLASSES, columns[-1] - 2]
        random = torch.randint(2, VOCAB, (count,))
        columns.append(torch.where(torch.rand(count) < NOISE, random, follows))
    return torch.stack(columns, 1)


@torch.no_grad()
def answers(model: LlamaForCausalLM, count: int, prefix: str) -> list[Record]:
    """What the model says greedily after prompts of the source."""
    ids = texts(count, PROMPT)
    for _ in range(ANSWER):
        ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
    return [record(f"{prefix}{i}", row, PROMPT) for i, row in enumerate(ids.tolist())]


def write_answers(model: LlamaForCausalLM, folder: Path, out: Path, *, count: int) -> Path:
    torch.manual_seed(1)
    return write_data(folder, out, answers(model, count, "r"), answers(model, 40, "h"))
