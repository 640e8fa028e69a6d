"""The two engines of the demo: plain decoding without a head, and with drafts by `auto`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headstart.demo import WARM_UP
from headstart.demo.race import Side, race
from headstart.demo.shipped import shipped_vocab

if TYPE_CHECKING:
    from headstart.engine.engine import Engine

Weights = Literal["int8", "int4", "as-dtype"]
MAX_LEN = 2048  # enough for short questions, and no more memory than that
_WARM_UP_TOKENS = 48


def open_engines(
    model: Path, *, weights: Weights, threads: int | None = None, head: Path | None = None
) -> dict[Side, Engine]:
    """Both, warmed up; `auto` has seen a few rounds. `head`: where the model has none inside."""
    import torch

    from headstart.engine.engine import Engine
    from headstart.engine.options import EngineOptions

    common = EngineOptions(
        speculate="auto", weights=weights, threads=threads, max_running_requests=1,
        max_model_len=MAX_LEN,
    )  # fmt: skip
    drafted = Engine(model, head, options=common, draft_vocab=shipped_vocab())
    # The number of threads is a setting of the process: what the first engine measured stays.
    threads = torch.get_num_threads()
    plain = Engine(model, options=replace(common, speculate=0, threads=threads))
    engines: dict[Side, Engine] = {"plain": plain, "drafted": drafted}
    params = plain.prompts.default_params(max_tokens=_WARM_UP_TOKENS, ignore_eos=True)
    race(engines, WARM_UP, params)
    return engines
