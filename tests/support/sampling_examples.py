"""Every field of a request's sampling settings, with values that matter, for small models."""

from __future__ import annotations

from typing import Any

from support.engine_runs import VOCAB

WARM = {"temperature": 0.9}
# By fields: settings in which they matter.
EXAMPLES: dict[tuple[str, ...], dict[str, Any]] = {
    ("min_tokens", "ignore_eos", "stop_token_ids"): {
        "min_tokens": 2, "stop_token_ids": tuple(range(40)), "ignore_eos": False,
    },
    ("temperature", "seed"): {"temperature": 1.2, "seed": 77},
    ("top_k", "n"): {**WARM, "top_k": 40, "n": 2},
    ("top_p",): {**WARM, "top_p": 0.8},
    ("min_p",): {**WARM, "min_p": 0.1},
    ("repetition_penalty",): {"repetition_penalty": 1.3},
    ("presence_penalty", "frequency_penalty"): {"presence_penalty": 1, "frequency_penalty": 1},
    ("logit_bias",): {"logit_bias": {5: 4.0, 9: -3.0}},
    ("allowed_token_ids",): {"allowed_token_ids": tuple(range(0, VOCAB, 3))},
    ("banned_token_ids",): {**WARM, "banned_token_ids": tuple(range(0, VOCAB, 2))},
    ("stop", "detokenize", "skip_special_tokens", "include_stop_str_in_output"): {
        "stop": ("never",), "detokenize": True, "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    },
    ("logprobs",): {**WARM, "logprobs": 20},
    ("prompt_logprobs",): {"prompt_logprobs": 2},
    ("logprobs_mode",): {**WARM, "logprobs": 2, "logprobs_mode": "processed", "top_p": 0.9},
    ("speculate", "max_tokens"): {"speculate": 2, "max_tokens": 4},
    ("acceptance",): {**WARM, "acceptance": "rejection", "speculate": 0},
    ("draft_vocab",): {"draft_vocab": "small"},
    ("draft_from",): {"draft_from": "context"},
}  # fmt: skip
TOGETHER: dict[str, Any] = {
    **WARM, "top_k": 30, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1,
    "presence_penalty": 0.2, "frequency_penalty": 0.2, "logit_bias": {5: 1.0},
    "banned_token_ids": (3,), "min_tokens": 2, "logprobs": 3,
}  # fmt: skip
