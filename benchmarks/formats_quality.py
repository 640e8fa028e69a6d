"""What every quantised format costs a real model: perplexity, agreement, acceptance of its head.

python benchmarks/formats_quality.py MODEL QUESTIONS.jsonl [--formats awq gptq ...] [--work DIR]
    [--tokens 2048] [--window 512] [--questions 16] [--answer 96] [--threads 2] [--out FILE.json]

MODEL (a folder, or `demo`) is rounded to BF16, and that is stored in each format that `calibrate
--weights` writes, and in two that are read only (`read_formats.py`), to nearest, as releases are
stored: embedding and LM head stay plain, FP8 formats quantise the head's block, too. `+rows` is the
same files with the inputs of products rounded to FP8, as kernels of GPUs take them. Each checkpoint
is then read back and compared with BF16 on the text of the questions: perplexity, how often the
most likely token is the same, mean KL divergence. Its engine answers the questions greedily with
K = 3; the acceptance length is that of its own texts. Products are in fp32 everywhere. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from read_formats import READ, RoundedRows
from torch import nn

from headstart import demo
from headstart.backends.torch.threads import prepare
from headstart.backends.weights import convert_weights
from headstart.checkpoint.quantized.writing import FORMATS
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.values import in_memory, load
from headstart.checkpoint.writer import FolderPlan, split_shards, write_folder
from headstart.data.conversations import read_conversations
from headstart.data.prompt_reader import PromptReader
from headstart.engine.engine import Engine
from headstart.heads.quantized_copy import copy_in
from headstart.models.build import build
from headstart.models.documents import Documents, Passage
from headstart.sampling.params import SamplingParams

PLAIN = "bf16"
DRAFTS = 3
WRITTEN = {**FORMATS, **READ}
ROWS = "+rows"  # behind the name of a format: what is multiplied with it is rounded, too
ALL = (*WRITTEN, *(f"{form}{ROWS}" for form in FORMATS if form.startswith("fp8")))


def stored(model: Checkpoint, form: str, out: Path) -> int:
    """Write the model in a format; how many bytes its tensors take."""
    tensors: dict[str, TensorSource] = {
        name: in_memory(load(model.source(name)).to(torch.bfloat16)) for name in model.tensors
    }
    config = {**model.config.raw, "torch_dtype": "bfloat16"}
    if form != PLAIN:
        config, tensors = copy_in(WRITTEN[form], config, tensors)
    copies = {path.name: path for path in model.side_files()}
    plan = FolderPlan(split_shards(tensors), copies, {"config.json": config})
    write_folder(plan, out, provenance={"operation": "benchmark"})
    return sum(source.num_bytes for source in tensors.values())


@torch.inference_mode()
def log_probs(
    folder: Path, windows: list[list[int]], *, rounds_rows: bool = False
) -> Iterator[torch.Tensor]:
    """log P(next token) at the positions of each window, [n, vocab]."""
    model = build(Checkpoint.open(folder), device="cpu", dtype="float32", with_head=False)
    if rounds_rows:
        convert_weights(model.trunk, RoundedRows.of)
    prepare(model, chooses_threads=False)
    for window in windows:
        documents = Documents((len(window),))
        ids = torch.tensor(window)
        contexts = [Passage(documents) for _ in model.trunk.layers]
        states = model.trunk(ids, documents.positions(ids.device), contexts)
        yield model.trunk.logits(model.trunk.final_norm(states)).log_softmax(-1)[:-1]


def compared(
    reference: list[torch.Tensor], folder: Path, windows: list[list[int]], *, rounds_rows: bool
) -> dict[str, float]:
    loss = same = divergence = 0.0
    count = 0
    values = log_probs(folder, windows, rounds_rows=rounds_rows)
    for window, plain, found in zip(windows, reference, values, strict=True):
        wide = plain.float()
        loss -= float(found.gather(1, torch.tensor(window[1:])[:, None]).sum())
        same += float((wide.argmax(-1) == found.argmax(-1)).sum())
        divergence += float((wide.exp() * (wide - found)).sum())
        count += len(found)
    return {
        "perplexity": round(math.exp(loss / count), 4),
        "same_most_likely_token": round(same / count, 4),
        "mean_kl": round(divergence / count, 5),
    }


def acceptance(
    folder: Path, prompts: list[list[int]], length: int, threads: int, *, rounds_rows: bool
) -> dict[str, Any]:
    """Of the head in the checkpoint, on what its trunk writes."""
    engine = Engine(
        folder, device="cpu", dtype="float32", speculate=DRAFTS, threads=threads,
        kernels="off" if rounds_rows else "auto",
    )  # fmt: skip
    parts = (engine.model.trunk, engine.model.head)
    for part in parts if rounds_rows else ():
        assert isinstance(part, nn.Module)
        convert_weights(part, RoundedRows.of)
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    results = engine.generate(prompts, params)
    rounds = [result.outputs[0].stats.acceptance for result in results]
    accepted = [sum(each.accepted[depth] for each in rounds) for depth in range(DRAFTS)]
    drafted = [sum(each.drafted[depth] for each in rounds) for depth in range(DRAFTS)]
    total = sum(each.rounds for each in rounds)
    return {
        "acceptance_length": round(1 + sum(accepted) / total, 3),
        "cumulative": [round(a / d, 3) for a, d in zip(accepted, drafted, strict=True)],
        "rounds": total,
        "notes": [note for note in engine.notes if "weights" in note],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("questions_file", type=Path)
    parser.add_argument("--formats", nargs="*", choices=ALL, default=list(ALL))
    parser.add_argument("--work", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--answer", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    folder = demo.folder() if given.model == "demo" else Path(given.model)
    model, reader = Checkpoint.open(folder), PromptReader(Checkpoint.open(folder))
    asked = [str(each.messages[0]["content"]) for each in read_conversations(given.questions_file)]
    text = reader.read("\n\n".join(asked))[: given.tokens]
    windows = [text[at : at + given.window] for at in range(0, len(text) - 1, given.window)]
    step = max(1, len(asked) // given.questions)
    prompts = [
        reader.read([{"role": "user", "content": turn}])
        for turn in asked[::step][: given.questions]
    ]
    work = given.work or Path(tempfile.mkdtemp(prefix="headstart-formats-"))
    work.mkdir(parents=True, exist_ok=True)
    reference: list[torch.Tensor] = []
    rows = []
    for form in (PLAIN, *given.formats):
        out, rounds_rows = work / form, form.endswith(ROWS)
        shutil.rmtree(out, ignore_errors=True)
        size = stored(model, form.removesuffix(ROWS), out)
        if not reference:
            reference = list(log_probs(out, windows))
        row = {
            "format": form, "bytes": size,
            **compared(reference, out, windows, rounds_rows=rounds_rows),
            **acceptance(out, prompts, given.answer, given.threads, rounds_rows=rounds_rows),
        }  # fmt: skip
        rows.append(row)
        print(json.dumps(row), flush=True)
        shutil.rmtree(out)
    result = {"model": given.model, "tokens": len(text), "questions": len(prompts), "rows": rows}
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
