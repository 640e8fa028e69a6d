"""What tests of copies in device rounds share: engines with interpreted kernels, and prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headstart.copying.drafts import Copy
from headstart.engine.auto.copies import PlannedRound
from headstart.engine.engine import Engine
from headstart.engine.request import Request
from headstart.sampling.params import SamplingParams
from support.engine_runs import ids_of, run
from support.kernel_runs import BLOCK_BYTES
from support.long_runs import unless_long

BEGINS = unless_long([[9, 10, 11]], [[9, 10, 11], [5, 6], [17, 3, 8, 2]])


def start(folder: Path, **settings: Any) -> Engine:
    settings = {"speculate": "auto", "kv_bytes": 200 * BLOCK_BYTES, **settings}
    return Engine(folder, dtype="float32", block_size=4, kernels="on", **settings)


def take_all(
    engine: Engine,
    *,
    drafts: int,
    confirmed: bool = False,
    copied: int = 8,
    rows: int | None = None,
) -> None:
    """Whatever rounds cost: so many drafts of the head, and every copy that there is."""
    assert engine.policy is not None

    def plan(
        requests: Sequence[Request], num_running: int, copies: Mapping[Request, Copy]
    ) -> PlannedRound:
        sure = frozenset(copies) if confirmed else frozenset[Request]()
        return PlannedRound(dict.fromkeys(requests, drafts), dict.fromkeys(copies, copied),
                            confirmed=sure, rows=rows)  # fmt: skip

    engine.policy.plan_round = plan


def asked(count: int = unless_long(16, 24), **fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": count, "ignore_eos": True, **fields})


def plain_engine(folder: Path) -> Engine:
    return Engine(folder, dtype="float32", speculate=0, kernels="off", kv_bytes=1 << 20)


def texts_of(folder: Path, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return ids_of(run(plain_engine(folder), prompts, params))


def prompts_of(folder: Path) -> list[list[int]]:
    """What the model would write, changed here and there, and its beginning again."""
    said = texts_of(folder, BEGINS, asked(20))
    changed = [[(t + 1) % 64 if i % 7 == 6 else t for i, t in enumerate(own)] for own in said]
    return [[*begin, *own, *begin] for begin, own in zip(BEGINS, changed, strict=True)]
