"""Small checkpoints of every kind of layer on a CPU, beside SmolLM2's shape: compiled and plain.

python benchmarks/cpu_families.py --work DIR [--tokens 32] [--repeats 5] [--out FILE]
                                  [--weights int8 fp32] [--drafts 0 3] [--only NAME ...]
                                  [--threads 2] [--processor-time]

Makes calibrated checkpoints (rate 0.8) with SmolLM2-135M's vocabulary and hidden size, and layers
as each family has them. The torch backend (with the compiled int8 products, as all but dense models
ran before), the numba backend where it runs the model, and the numba backend with SmolLM2's shape
take turns in short runs, so that a busy moment hits all of them; figures are medians over turns.
Tokens behind the first one count. With --processor-time seconds are those that this process was
given, which other programs change less: for one thread. Bytes are those of the weights that a round
reads: what a row is multiplied with, LM head included, and of routed experts as many as so many
rows choose if they choose independently; K/V and recurrent states do not count. `per_byte` is bytes
per second over those of SmolLM2's shape. The last line of output is one JSON document; --page makes
a table of it. What --out has from an earlier run of the same kind is kept and not measured again.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from cpu_shapes import DENSE, FAMILIES, config_of
from torch import nn

from headstart.backends import select
from headstart.backends.numba.support import why_not_whole
from headstart.backends.options import Weights
from headstart.calibrate.calibrated import write_calibrated
from headstart.calibrate.shapes import SHAPES
from headstart.checkpoint.reader import Checkpoint
from headstart.engine.engine import Engine
from headstart.models.build import build
from headstart.models.feed_forward import Experts, MoE
from headstart.models.linear import Linear, Stack
from headstart.models.mla import LatentAttention
from headstart.sampling.params import SamplingParams

RATE = 0.8
FORMATS: dict[str, tuple[Weights, int]] = {"int8": ("int8", 1), "fp32": ("as-dtype", 4)}
BACKENDS = ("torch", "numba")


class Contender:
    """One engine that answers one request at a time."""

    def __init__(self, folder: Path, weights: Weights, drafts: int, backend: str, threads: int):
        own = select.TABLE["numba"]
        if backend == "torch":
            select.TABLE["numba"] = lambda model, options: "the torch backend is measured"
        try:
            self._engine = Engine(
                folder, device="cpu", speculate=drafts, weights=weights, threads=threads,
                dtype="float32", max_model_len=2048, kv_bytes=1 << 28, prefix_caching=False,
            )  # fmt: skip
        finally:
            select.TABLE["numba"] = own
        self.is_compiled = self._engine.backend.name == "numba"
        self.why_plain = why_not_whole(self._engine.model)
        assert self.is_compiled == (backend == "numba" and self.why_plain is None)

    def run(self, tokens: int, clock: Callable[[], float]) -> tuple[float, float]:
        """Tokens per second behind the first ones, and the acceptance length."""
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        name = self._engine.add(list(range(200, 232)), params)
        first = 0
        while not first:
            first = sum(len(update.token_ids) for update in self._engine.step())
        began = clock()
        while self._engine.has_work:
            self._engine.step()
        seconds, result = clock() - began, self._engine.collect(name)
        assert result is not None
        return (len(result.outputs[0].token_ids) - first) / seconds, result.stats.acceptance.length


def bytes_read(module: nn.Module, rows: int, size: int) -> float:
    """Bytes of the products below a module that so many rows read; a weight has `size`.

    Routers and what unfolds latents stay in float32.
    """
    total = 0.0
    for own in module.modules():
        if isinstance(own, MoE):
            config, experts = own.router.config, own.experts
            assert isinstance(experts, Experts)
            unread = (1 - config.top_k / config.num_experts) ** rows
            stacks = (experts.gate_up, experts.down)
            each = sum(s.weight[0].numel() for s in stacks if isinstance(s, Stack))
            total += 4 * own.router.weight.numel()
            total += config.num_experts * (1 - unread) * each * size
        elif isinstance(own, LatentAttention):
            total += 4 * own.kv_up.numel()
        elif isinstance(own, Linear):
            total += own.weight.numel() * size
    return total


def round_bytes(folder: Path, drafts: int, size: int) -> tuple[float, int]:
    """Bytes of weights that a round reads, and how many parameters there are."""
    model = build(Checkpoint.open(folder), device="cpu", dtype="float32")
    trunk, lm_head = model.trunk, model.trunk.lm_head.weight.numel()
    read = bytes_read(trunk, 1 + drafts, size)
    if drafts and model.head is not None:
        modules = [model.head.module(depth) for depth in range(1, drafts + 1)]
        read += sum(bytes_read(module, 1, size) for module in modules)
        read += drafts * lm_head * size
    own = [trunk, *([] if model.head is None else [model.head])]
    return read, sum(p.numel() for module in own for p in module.parameters())


def measure(folder: Path, kind: str, drafts: int, arguments: argparse.Namespace) -> dict[str, Any]:
    weights, size = FORMATS[kind]
    dense, threads = arguments.work / DENSE, arguments.threads
    own = {name: Contender(folder, weights, drafts, name, threads) for name in BACKENDS}
    why_plain = own["numba"].why_plain
    if why_plain is not None:  # then both are the same
        del own["numba"]
    served = "torch" if why_plain is not None else "numba"
    if folder != dense:
        own["smollm2"] = Contender(dense, weights, drafts, "numba", threads)
    speeds: dict[str, list[float]] = {name: [] for name in own}
    lengths = dict.fromkeys(own, 1.0)
    clock = time.process_time if arguments.processor_time else time.perf_counter
    for _ in range(arguments.repeats + 1):
        for name, contender in own.items():
            speed, lengths[name] = contender.run(arguments.tokens, clock)
            speeds[name].append(speed)
    found: dict[str, Any] = {"weights": kind, "K": drafts, "length": round(lengths[served], 3)}
    if why_plain is not None:
        found["why_plain"] = why_plain
    rates = {}
    for name in own:
        read, parameters = round_bytes(dense if name == "smollm2" else folder, drafts, size)
        if name == served:
            found |= {"parameters": parameters, "bytes_per_round": round(read)}
        median = statistics.median(speeds[name][1:])  # the first one warms up
        rates[name] = median / lengths[name] * read
        found[name] = {
            "tokens_per_second": round(median, 1),
            "gigabytes_per_second": round(rates[name] / 1e9, 2),
        }
    found["per_byte"] = round(rates[served] / rates.get("smollm2", rates[served]), 3)
    own.clear()
    gc.collect()  # an engine is a cycle, and three of them are gigabytes
    return found


def page(result: Mapping[str, Any]) -> str:
    """A table of a document."""
    lines = [
        "| checkpoint | weights | K | MB of a round | tokens/s, plain | compiled | times | GB/s "
        "| SmolLM2's | per byte |", "|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, rows in result["families"].items():
        for row in rows:
            plain = row["torch"]["tokens_per_second"]
            served = row.get("numba", row["torch"])
            speed, rate = served["tokens_per_second"], served["gigabytes_per_second"]
            beside = row.get("smollm2", served)["gigabytes_per_second"]
            shown = f"{speed} | {speed / plain:.2f}" if "numba" in row else "- | -"
            lines.append(
                f"| {name} | {row['weights']} | {row['K']} | {row['bytes_per_round'] / 1e6:.0f} "
                f"| {plain} | {shown} | {rate} | {beside} | {row['per_byte']:.2f} |"
            )
    return "\n".join(lines)


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), "?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, help="folder for the checkpoints")
    parser.add_argument("--page", type=Path, help="a table of this result, and nothing else")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--processor-time", action="store_true", help="for one thread")
    parser.add_argument("--weights", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--drafts", nargs="+", type=int, default=[0, 3])
    parser.add_argument("--only", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.page:
        print(page(json.loads(arguments.page.read_text())))
        return
    if arguments.work is None:
        parser.error("--work is missing")
    if arguments.processor_time and arguments.threads != 1:
        parser.error("--processor-time counts threads that wait; give --threads 1")
    SHAPES.update({f"cpu-{name}": config_of(name) for name in FAMILIES})
    result: dict[str, Any] = {
        "rate": RATE, "tokens": arguments.tokens, "repeats": arguments.repeats,
        "threads": arguments.threads, "clock": "processor" if arguments.processor_time else "wall",
        "processor": processor(), "torch": torch.__version__,
        "numba": numba.__version__, "numpy": np.__version__, "python": platform.python_version(),
        "families": {},
    }  # fmt: skip
    if arguments.out and arguments.out.exists():
        before = json.loads(arguments.out.read_text())
        same = {n: v for n, v in result.items() if n != "families"}
        if {**before, "families": None} != {**same, "families": None}:
            parser.error(f"--out {arguments.out} is of another kind of run")
        result["families"] = before["families"]
    for name in {DENSE: None, **dict.fromkeys(arguments.only)}:
        folder = arguments.work / name
        if not folder.exists():
            write_calibrated(f"cpu-{name}", RATE, folder, dtype="F32")
        if name not in arguments.only:
            continue
        rows = result["families"].setdefault(name, [])
        known = {(row["weights"], row["K"]) for row in rows}
        for kind in arguments.weights:
            for drafts in arguments.drafts:
                if (kind, drafts) in known:
                    continue
                found = measure(folder, kind, drafts, arguments)
                rows.append(found)
                shown = "  ".join(
                    f"{each} {found[each]['tokens_per_second']:6.1f} tokens/s, "
                    f"{found[each]['gigabytes_per_second']:5.2f} GB/s"
                    for each in BACKENDS if each in found
                )  # fmt: skip
                print(f"{name:14} {kind} K = {drafts}: {shown}; {found['per_byte']:.2f} of "
                      "SmolLM2's bytes per second", flush=True)  # fmt: skip
                if arguments.out:
                    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
