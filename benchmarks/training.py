"""Tokens per second and peak memory of training a head, by loss, context and source of states.

PYTHONPATH=. python3 benchmarks/training.py --out results.json            # on a GPU: 7.8B trunk
python benchmarks/training.py --shape smollm2-135m --tokens 1024 --out results.json   # on a CPU

Weights are random: a step costs the same whatever they are. The first table times the losses
alone, in chunks and in one piece; the second whole steps (forward, backward and update of the
head), with states computed in process and with states read from a cache on disk.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from random_models import random_model

from headstart.calibrate.shape_config import shape_config
from headstart.models.config_reader import model_config
from headstart.models.documents import Documents
from headstart.models.unroll import trunk_states
from headstart.train.learner import Learner
from headstart.train.losses.lm_head import LmHead
from headstart.train.losses.rows import depth_losses
from headstart.train.options import TrainOptions, changed, resolve
from headstart.train.parallel import World
from headstart.train.states.cache import StateCache
from headstart.train.states.header import CacheHeader
from headstart.train.states.writer import CacheWriter
from headstart.train.step import Batch, learn
from headstart.train.targets import Counts, targets

LOSSES = ("ce", "kl", "lk", "tv", "e2e-tv")
DEPTHS = 3


class Meter:
    """Median seconds and the most memory above what was held before."""

    def __init__(self, device: torch.device, repeats: int):
        self.device, self.repeats = device, repeats

    def __call__(self, run: Callable[[], object]) -> tuple[float, float]:
        run()
        self._wait()
        held = self._reset()
        times = []
        for _ in range(self.repeats):
            started = time.perf_counter()
            run()
            self._wait()
            times.append(time.perf_counter() - started)
        return statistics.median(times), self._peak() - held

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _reset(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated() / 1e6
        Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory starts anew
        return _status("VmRSS")

    def _peak(self) -> float:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 1e6
        return _status("VmHWM")


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith(field))


def time_losses(
    meter: Meter, lm_head: LmHead, rows: int, width: int, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """All depths of one packed row, in one piece and in chunks."""
    device, vocab = meter.device, lm_head.weight.shape[0]
    depths = [torch.randn(rows, width, device=device, dtype=dtype) for _ in range(DEPTHS)]
    teacher = torch.randn(rows, width, device=device, dtype=dtype)
    labels = torch.randint(vocab, (rows,), device=device)
    result = []
    for kind in LOSSES:
        found: dict[str, Any] = {"loss": kind, "rows": rows, "vocab": vocab}
        # A tenth of what all rows take, as the documentation promises.
        for name, limit in (("whole", None), ("chunks", rows * vocab // 12)):

            def run(kind: str = kind, limit: int | None = limit) -> None:
                depth_losses(
                    kind, depths, lm_head, labels=labels, teacher=teacher, max_elements=limit
                )

            seconds, memory = meter(run)
            found |= {f"{name}_ms": seconds * 1e3, f"{name}_MB": memory}
        found["slowdown"] = found["chunks_ms"] / found["whole_ms"]
        found["memory_share"] = found["chunks_MB"] / found["whole_MB"]
        print(json.dumps({k: v if isinstance(v, str) else round(v, 3) for k, v in found.items()}))
        result.append(found)
    return result


class Bench:
    """A frozen trunk, a packed row, and its states in memory and on disk."""

    def __init__(self, given: argparse.Namespace, meter: Meter, dtype: torch.dtype):
        self.meter, self.dtype, device = meter, dtype, meter.device
        self.config = model_config(shape_config(given.shape))
        self.trunk, self.head = random_model(self.config, device, dtype, 4096)
        self.lm_head = LmHead.of(self.trunk.lm_head.weight)
        self.documents = Documents((given.document,) * (given.tokens // given.document))
        self.ids = torch.randint(self.config.vocab, (self.documents.num_rows,), device=device)
        position = self.documents.positions(torch.device("cpu"))
        self.mask = position >= given.document // 4  # a quarter is prompt

    def in_process(self) -> torch.Tensor:
        return trunk_states(self.trunk, self.ids, self.documents, "after_final_norm")

    def cached(self, folder: Path) -> Callable[[], torch.Tensor]:
        """A reader of states that were written to disk."""
        header = CacheHeader(
            trunk_digest="trunk", tokenizer_sha="tokenizer", dataset_fingerprint="data",
            hidden_kind="after_final_norm", dtype="bf16", hidden_size=self.config.hidden,
        )  # fmt: skip
        with CacheWriter(folder, header) as writer:
            parts = torch.split(self.in_process(), list(self.documents.lengths))
            for number, part in enumerate(parts):
                writer.add(str(number), part)
            writer.finish()
        cache = StateCache.open(folder, header)

        def read() -> torch.Tensor:
            names = map(str, range(len(self.documents.lengths)))
            parts = [cache.states(name, self.dtype) for name in names]
            return torch.cat(parts).to(self.meter.device)

        return read

    def step(self, learner: Learner, counts: Counts, make: Callable[[], torch.Tensor]) -> None:
        states = make()
        embedded = self.trunk.embed[self.ids]
        batch = Batch(
            [], self.ids, self.mask, self.documents, embedded, states, states, self.trunk.rotary
        )
        learn(learner, batch, counts)
        learner.update(1e-6)

    def time_steps(self, folder: Path) -> list[dict[str, Any]]:
        sources = {"in process": self.in_process, "cached": self.cached(folder)}
        starts = targets(self.mask, self.documents, DEPTHS).starts
        counts = Counts(tuple(int((s >= 0).sum()) for s in starts), int((starts[-1] >= 0).sum()))
        head = self.head.float() if self.dtype == torch.bfloat16 else self.head
        result = []
        for loss, context in itertools.product(LOSSES, ("prefix", "sequence")):
            options = changed(
                TrainOptions(num_depths=DEPTHS, optimizer="adamw"),
                {"loss": loss, "context": context},
            )
            learner = Learner(
                "bench", resolve(options), head.requires_grad_(True), self.lm_head,
                dtype=self.dtype, world=World(),
            )  # fmt: skip
            for source, make in sources.items():
                seconds, memory = self.meter(partial(self.step, learner, counts, make))
                speed = self.documents.num_rows / seconds
                row = {"loss": loss, "context": context, "states": source}
                found = {**row, "tokens_per_second": round(speed), "peak_MB": round(memory)}
                print(json.dumps(found), flush=True)
                result.append(found)
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="mimo-7b")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--document", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--loss-rows", type=int, default=4096)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    bench = Bench(given, Meter(device, given.repeats), dtype)
    with torch.no_grad():
        losses = time_losses(
            bench.meter, bench.lm_head, given.loss_rows, bench.config.hidden, dtype
        )
    with tempfile.TemporaryDirectory() as folder:
        steps = bench.time_steps(Path(folder) / "cache")
    if given.out:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        facts = {
            "device": name, "threads": torch.get_num_threads(), "torch": torch.__version__,
            "date": datetime.now(UTC).isoformat(timespec="seconds"), "shape": given.shape,
            "tokens": given.tokens, "document": given.document, "depths": DEPTHS,
        }  # fmt: skip
        given.out.write_text(json.dumps({**facts, "losses": losses, "steps": steps}, indent=1))


if __name__ == "__main__":
    main()
