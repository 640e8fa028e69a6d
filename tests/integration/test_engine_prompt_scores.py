"""Log-probabilities of prompts: transformers' own, on every backend, whatever is cached."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_runs import ids_of, transformers_model
from support.long_runs import unless_long
from support.tiny_fixture import Tiny

from headstart.backends.scores import RowScores
from headstart.engine.engine import Engine
from headstart.engine.output import Result
from headstart.sampling.choose import TokenLogprob
from headstart.sampling.params import SamplingParams

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64,
}  # fmt: skip
PROMPT = [(5 * i * i) % 61 + 2 for i in range(30)]
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "block_size": 4, "kv_bytes": 1 << 17, "max_batched_tokens": 16,
    "threads": 1, "device": "cpu",
}  # fmt: skip
BACKENDS = {"torch": {"kernels": "off"}, "numba": {}, "cuda": {"kernels": "on"}}


def asked(**fields: Any) -> SamplingParams:
    own = {"temperature": 0, "max_tokens": 3, "ignore_eos": True, "prompt_logprobs": 3, **fields}
    return SamplingParams(**own)


@pytest.fixture(scope="module")
def folder(tiny: Tiny) -> Path:
    return tiny("mimo", rate=0.9, seed=1, dtype="F32", **SIZES)


@pytest.fixture(scope="module")
def wanted(folder: Path) -> torch.Tensor:
    """[tokens, V] log-probabilities behind each token of the prompt, by transformers."""
    with torch.inference_mode():
        logits = transformers_model(folder)(torch.tensor([PROMPT])).logits[0]
    return logits.log_softmax(-1)


def assert_scored(result: Result, wanted: torch.Tensor, prompt: list[int] = PROMPT) -> None:
    found = result.prompt_logprobs
    assert found is not None and [entry.token for entry in found] == prompt[1:]
    for row, entry in enumerate(found):
        assert entry.logprob == pytest.approx(float(wanted[row, entry.token]), abs=1e-4)
        best = wanted[row].topk(3)
        assert list(entry.top) == best.indices.tolist()
        assert list(entry.top.values()) == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize("drafts", unless_long([2], [0, 2]))
def test_a_prompt_has_the_models_log_probabilities(
    backend: str, drafts: int, folder: Path, wanted: torch.Tensor, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip({"cuda": "triton", "numba": "numba"}.get(backend, "torch"))
    if backend == "cuda":
        request.getfixturevalue("quick_kernels")
    engine = Engine(folder, speculate=drafts, **SETTINGS, **BACKENDS[backend])
    plain = engine.generate([PROMPT], asked(prompt_logprobs=None))
    assert plain[0].prompt_logprobs is None
    # What was cached by the first request does not hide rows; others decode meanwhile.
    results = engine.generate([PROMPT[:9], PROMPT], [asked(max_tokens=9), asked(n=2)])
    assert_scored(results[1], wanted)
    assert_scored(results[0], wanted, PROMPT[:9])
    assert results[1].num_cached_tokens == 0
    assert ids_of(results[1:]) == 2 * ids_of(plain)


def test_nothing_but_the_prompt_is_read_where_no_token_is_asked_for(
    folder: Path, wanted: torch.Tensor
) -> None:
    engine = Engine(folder, speculate=2, **SETTINGS)
    updates = list(engine.stream(PROMPT, asked(max_tokens=0)))
    (last,) = updates
    assert last.token_ids == [] and last.text == "" and last.finish_reason == "length"
    assert last.prompt_logprobs is not None and len(last.prompt_logprobs) == len(PROMPT) - 1
    (result,) = engine.generate([PROMPT], asked(max_tokens=0))
    assert_scored(result, wanted)
    assert result.outputs[0].token_ids == [] and result.stats.first_token_seconds is None
    assert engine.generate([PROMPT], asked(max_tokens=0, prompt_logprobs=None))[0].outputs[0]


def test_a_request_that_starts_again_has_each_entry_once(
    folder: Path, wanted: torch.Tensor
) -> None:
    """Memory for one and a half requests: the second is read, loses its memory, is read again."""
    engine = Engine(folder, speculate=2, **{**SETTINGS, "kv_bytes": 14 * 1280})
    params = [asked(max_tokens=28, prompt_logprobs=None), asked(max_tokens=20)]
    results = engine.generate([[9, *PROMPT[:6]], PROMPT], params)
    assert engine.stats.preemptions > 0
    assert_scored(results[1], wanted)


def test_rows_with_logits_are_read_in_half_of_a_pass(folder: Path) -> None:
    engine = Engine(folder, speculate=0, **SETTINGS)
    engine.add(PROMPT, asked())
    engine.step()
    assert engine.stats.prompt_tokens == SETTINGS["max_batched_tokens"] // 2


def test_entries_are_made_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: they were made for the first update, and again for the result."""
    made, of = [], RowScores.of

    def counted(self: RowScores, tokens: Sequence[int]) -> list[TokenLogprob]:
        made.extend(tokens)
        return of(self, tokens)

    monkeypatch.setattr(RowScores, "of", counted)
    (result,) = Engine(folder, speculate=0, **SETTINGS).generate([PROMPT], asked())
    assert result.prompt_logprobs is not None and made == PROMPT[1:]
