"""Exact mode on a GPU: a row's bits beside any others, and texts whatever is drafted.

python scripts/gpu_exact_check.py            sizes of MiMo-7B, bf16
python scripts/gpu_exact_check.py --small    sizes for Triton's interpreter, to try the script

Every kernel of the trunk gives 40 rows alone, among 1 to 40 rows, and at all 40 places. Then whole
engines answer the same prompts for several K, batches, chunks and memory sizes. Prints one JSON
line; exits 1 if a bit or a token differs in exact mode. What plain kernels do is only reported.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.calibrate.tiny import write_tiny
from headstart.engine.engine import Engine
from headstart.gpu.exact import ExactKernels, filled
from headstart.gpu.forward import Kernels
from headstart.kernels.rows import add_norm, place_qkv
from headstart.models.attention import LayerCache
from headstart.models.linear import Linear
from headstart.sampling.params import SamplingParams

PAGE = 16
Run = Callable[[Tensor], Tensor]  # which rows, in which order -> their results [n, ...]


@dataclass(frozen=True)
class Sizes:
    hidden: int = 4096
    intermediate: int = 11008
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    vocab: int = 151680
    positions: int = 32768
    context: int = 3000  # of the longest row
    rows: int = 40
    tokens: int = 40  # of an answer
    prompts: int = 10

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim


SMALL = Sizes(64, 96, 2, 1, 16, 96, 300, 280, rows=6, tokens=5, prompts=3)


class Rig:
    """Random weights and rows, and every step that a row of the trunk goes through."""

    def __init__(self, sizes: Sizes, device: str, dtype: torch.dtype):
        self.sizes, self.device, self.dtype = sizes, device, dtype
        self.kernels = ExactKernels(sizes.positions)
        self._draw = torch.Generator(device).manual_seed(0)

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        made = torch.randn(shape, generator=self._draw, device=self.device) * scale
        return made.to(self.dtype)

    def layer(self, outputs: int, inputs: int) -> Linear:
        result = Linear(0, 0)
        result.weight = torch.nn.Parameter(
            self.random(outputs, inputs, scale=inputs**-0.5), requires_grad=False
        )
        return result

    def steps(self) -> Iterator[tuple[str, Run]]:
        s = self.sizes
        for name, outputs, inputs in (
            ("qkv", s.qkv, s.hidden), ("o", s.hidden, s.heads * s.dim),
            ("down", s.hidden, s.intermediate),
        ):  # fmt: skip
            yield f"product {name}", self._product(outputs, inputs)
        yield "gated product", self._gated()
        yield "residual and norm", self._norm()
        for has_norms in (False, True):
            yield f"q, k, v{' with norms' if has_norms else ''}", self._qkv(has_norms)
        yield "attention", self._attention()
        yield from self._lm_head()

    def _product(self, outputs: int, inputs: int) -> Run:
        x, layer = self.random(self.sizes.rows, inputs), self.layer(outputs, inputs)
        return lambda rows: self.kernels.product(filled(x[rows]), layer).transpose(0, 1)[
            : len(rows)
        ]

    def _gated(self) -> Run:
        s = self.sizes
        x, layer = self.random(s.rows, s.hidden), self.layer(2 * s.intermediate, s.hidden)
        return lambda rows: self.kernels.gated(filled(x[rows]), layer)[: len(rows)]

    def _norm(self) -> Run:
        s = self.sizes
        stream, partial = self.random(s.rows, s.hidden), self.random(s.rows, 4, s.hidden).float()
        gain = self.random(s.hidden)

        def run(rows: Tensor) -> Tensor:
            own, sums = filled(stream[rows]), filled(partial[rows]).transpose(0, 1).contiguous()
            own = own.clone()
            return torch.cat([add_norm(own, sums, gain, 1e-5), own], 1)[: len(rows)]

        return run

    def _qkv(self, has_norms: bool) -> Run:
        s = self.sizes
        partial, bias = self.random(s.rows, 2, s.qkv).float(), self.random(s.qkv)
        norms = (self.random(s.dim), self.random(s.dim)) if has_norms else None
        cos, sin = self.random(s.rows, s.dim), self.random(s.rows, s.dim)
        slots = torch.arange(s.rows, device=self.device)

        def run(rows: Tensor) -> Tensor:
            k, v = (self.random(s.rows, s.kv_heads, s.dim) for _ in range(2))
            q = place_qkv(
                filled(partial[rows]).transpose(0, 1).contiguous(), bias, norms, 1e-5, cos, sin,
                filled(slots[rows]), filled(slots[rows].int(), -1), k, v, s.heads,
                each=self.kernels.heads_each,
            )  # fmt: skip
            return torch.cat([q[: len(rows)], k[rows], v[rows]], 1)

        return run

    def _attention(self) -> Run:
        s = self.sizes
        blocks = -(-s.context // PAGE)
        cache = LayerCache(*(self.random(blocks * PAGE, s.kv_heads, s.dim) for _ in range(2)))
        q = self.random(s.rows, s.heads, s.dim)
        host = torch.Generator().manual_seed(1)
        order = torch.stack([torch.randperm(blocks, generator=host) for _ in range(s.rows)])
        seen = torch.randint(0, s.context, (s.rows,), generator=host)
        tables, slots = order.int().to(self.device), seen.int().to(self.device)

        def run(rows: Tensor) -> Tensor:
            attend = self.kernels.by_row(tables[rows], slots[rows], PAGE)
            return attend(filled(q[rows]), cache)[: len(rows)]

        return run

    def _lm_head(self) -> Iterator[tuple[str, Run]]:
        s = self.sizes
        x, layer = self.random(s.rows, s.hidden, scale=4), self.layer(s.vocab, s.hidden)
        numbers = torch.arange(s.rows, device=self.device)
        heat, share = torch.full((s.rows,), 0.8, device=self.device), torch.ones(s.rows).to(x)
        noise = (heat, numbers * 7, numbers + 100)
        cuts = ((numbers % 3) * 20, share.float() * 0.9, share.float() * 0.01)
        yield "logits", lambda rows: self.kernels.whole(x[rows], layer)
        yield (
            "choice",
            lambda rows: self.kernels.choose(x[rows], layer, *(n[rows] for n in noise)),
        )
        yield (
            "truncated choice",
            lambda rows: self.kernels.choose_truncated(
                self.kernels.whole(x[rows], layer), *(n[rows] for n in (*noise, *cuts))
            ),
        )


def orders(count: int, device: str) -> Iterator[Tensor]:
    """Every number of rows, then every place of every row."""
    rows = torch.arange(count, device=device)
    yield from (rows[:number] for number in range(1, count + 1))
    yield from (rows.roll(places) for places in range(1, count))


def differing(run: Run, count: int, device: str) -> int:
    """In how many orders a row has other bits than alone."""
    alone = torch.cat([run(torch.tensor([row], device=device)) for row in range(count)])
    return sum(not torch.equal(run(order), alone[order]) for order in orders(count, device))


def check_kernels(sizes: Sizes, device: str, dtype: torch.dtype) -> dict[str, int]:
    rig = Rig(sizes, device, dtype)
    found = {}
    for name, run in rig.steps():
        found[name] = differing(run, sizes.rows, device)
        print(f"{name}: {found[name]} orders differ", file=sys.stderr, flush=True)
    x, layer = rig.random(sizes.rows, sizes.hidden), rig.layer(sizes.hidden, sizes.hidden)
    plain = Kernels()

    def by_library(rows: Tensor) -> Tensor:
        return plain.whole(x[rows], layer)

    return {**found, "plain library product": differing(by_library, sizes.rows, device)}


def prompts_of(sizes: Sizes, count: int, vocab: int) -> list[list[int]]:
    host = torch.Generator().manual_seed(3)
    shared = torch.randint(2, vocab, (sizes.tokens // 2,), generator=host).tolist()
    lengths = torch.randint(1, 3 * sizes.tokens, (count,), generator=host).tolist()
    return [
        [*shared, *torch.randint(2, vocab, (length,), generator=host).tolist()]
        for length in lengths
    ]


def settings_of(sizes: Sizes, count: int) -> list[SamplingParams]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 1.0}, {"temperature": 1.3, "top_k": 30, "top_p": 0.95},
        {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.1, "repetition_penalty": 1.1},
        {"temperature": 0.8, "logprobs": 2},
    ]  # fmt: skip
    return [
        SamplingParams(max_tokens=sizes.tokens, ignore_eos=True, seed=i, **kinds[i % len(kinds)])
        for i in range(count)
    ]


@dataclass(frozen=True)
class Answers:
    """Texts with the log-probabilities that were asked for, and what the run was like."""

    texts: list[list[int]]
    logprobs: list[list[float]]
    first_accepted: float | None
    preemptions: int


def answers(folder: Path, sizes: Sizes, vocab: int, **options: Any) -> Answers:
    one_by_one = options.pop("one_by_one", False)
    count = sizes.prompts
    prompts, params = prompts_of(sizes, count, vocab), settings_of(sizes, count)
    engine = Engine(folder, max_running_requests=1 if one_by_one else count, **options)
    results = engine.generate(prompts, params)
    engine.scheduler.check()
    outputs = [result.outputs[0] for result in results]
    rates = engine.stats.acceptance.cumulative
    return Answers(
        [output.token_ids for output in outputs],
        [[entry.logprob for entry in output.logprobs or ()] for output in outputs],
        rates[0] if rates else None,
        engine.stats.preemptions,
    )


def first_difference(one: Answers, other: Answers) -> int | None:
    """The earliest token of any prompt at which two runs part."""
    places = [
        next((at for at, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        for a, b in zip(one.texts, other.texts, strict=True)
    ]
    return min((place for place in places if place is not None), default=None)


def check_engines(sizes: Sizes, device: str, dtypes: list[str]) -> dict[str, Any]:
    small = sizes.hidden < 1024
    shape: dict[str, Any] = {
        "hidden_size": 64 if small else 1024, "num_attention_heads": 2 if small else 8,
        "num_key_value_heads": 1 if small else 2, "head_dim": 16 if small else 128,
        "intermediate_size": 64 if small else 2816, "num_hidden_layers": 1 if small else 4,
        "vocab_size": 64 if small else 4096, "max_position_embeddings": 128 if small else 1024,
    }  # fmt: skip
    vocab, modules = shape["vocab_size"], 1
    slot = 2 * shape["num_key_value_heads"] * shape["head_dim"]
    token = (shape["num_hidden_layers"] + modules) * slot + shape["hidden_size"] // 4
    # Tokens that fit: the longest request, and not all of them at their end.
    tight = max(5 * sizes.tokens + 8, sizes.prompts * sizes.tokens)
    base: dict[str, Any] = {"device": device, "kernels": "on", "block_size": 4}
    runs: dict[str, dict[str, Any]] = {
        "K=3": {"speculate": 3},
        "K=1, chunks of 20 rows, little memory": {"speculate": 1, "max_batched_tokens": 20},
        "K=3, one by one": {"speculate": 3, "one_by_one": True},
    }
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as work:
        folder = write_tiny("mimo", Path(work) / "model", rate=0.9, seed=1, dtype="F32", **shape)
        for dtype in dtypes:
            width = 2 if dtype == "bfloat16" else 4
            ample = 8 * tight * token * width
            common = {**base, "dtype": dtype, "kv_bytes": ample}
            plain = answers(folder, sizes, vocab, speculate=0, **common)
            drafted = answers(folder, sizes, vocab, speculate=3, **common)
            report[f"{dtype} plain K=3"] = {"first difference": first_difference(plain, drafted)}
            common["exact"] = True
            wanted = answers(folder, sizes, vocab, speculate=0, one_by_one=True, **common)
            for name, options in runs.items():
                if "memory" in name:
                    options = {**options, "kv_bytes": tight * token * width}
                found = answers(folder, sizes, vocab, **{**common, **options})
                report[f"{dtype} exact {name}"] = {
                    "first difference": first_difference(wanted, found),
                    "same log-probabilities": wanted.logprobs == found.logprobs,
                    "first draft accepted": round(found.first_accepted or 0.0, 3),
                    "preemptions": found.preemptions,
                }
                print(f"{dtype} {name}: done", file=sys.stderr, flush=True)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="of the engines")
    asked = parser.parse_args()
    sizes = SMALL if asked.small else Sizes()
    started = time.perf_counter()
    with torch.inference_mode():
        kernels = check_kernels(
            sizes, asked.device, torch.float32 if asked.small else torch.bfloat16
        )
    kernel_seconds = time.perf_counter() - started
    engines = check_engines(sizes, asked.device, asked.dtypes.split(","))
    exact = {name: entry for name, entry in engines.items() if "exact" in name}
    failures = [f"kernel: {n}" for n, bad in kernels.items() if bad and "plain" not in n]
    failures += [
        f"engine: {name}"
        for name, entry in exact.items()
        if entry["first difference"] is not None or not entry["same log-probabilities"]
    ]
    if not any(entry["preemptions"] for entry in exact.values()):
        failures.append("nobody was preempted: the check proves less than it should")
    if not any(0.1 < entry["first draft accepted"] < 0.98 for entry in exact.values()):
        failures.append("the head is always right or always wrong: the check proves nothing")
    name = torch.cuda.get_device_name() if asked.device.startswith("cuda") else asked.device
    print(
        json.dumps(
            {
                "device": name, "torch": torch.__version__, "failures": failures,
                "orders_with_other_bits": kernels, "engines": engines,
                "kernel_seconds": round(kernel_seconds, 1),
                "seconds": round(time.perf_counter() - started, 1),
            }
        )
    )  # fmt: skip
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
