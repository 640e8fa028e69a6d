"""What the simulator's tests share: answers of an engine as records of a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headstart.data.records import Record
from headstart.engine.output import Result

RULES = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "min_tokens", "stop_token_ids")


def record(result: Result, params: Any, number: int, **changes: Any) -> Record:
    """The first sample of a result, as `distill` keeps it."""
    output = result.outputs[0]
    ids = np.array([*result.prompt_token_ids, *output.token_ids], np.int32)
    num_prompt = len(result.prompt_token_ids)
    fields: dict[str, Any] = {
        "id": f"r{number}", "prompt_id": f"p{number}", "category": f"r{number}", "turn": 0,
        "sample": 0, "ids": ids, "mask": np.arange(len(ids)) >= num_prompt,
        "seed": output.stats.seed, "sampling": {name: getattr(params, name) for name in RULES},
        "finish_reason": output.finish_reason, "exact_ids": True, "num_prompt": num_prompt,
    }  # fmt: skip
    return Record(**{**fields, **changes})


def records(results: Sequence[Result], params: Any, **changes: Any) -> list[Record]:
    return [record(result, params, number, **changes) for number, result in enumerate(results)]
