"""Prompts join the trunk pass of requests that decode, if there are any; interpreted on the CPU.

Not where layers attend to latents or go on from states: there they have passes of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.long_runs import long_only
from support.tiny_fixture import Tiny
from torch import Tensor

pytest.importorskip("triton")

from support.kernel_runs import SIZES, few_programs
from support.kernel_sizes import LATENT

from headstart.backends.cuda import attending, device_rounds
from headstart.backends.cuda.backend import CudaBackend
from headstart.backends.cuda.kernels import attention, shared_prefix
from headstart.backends.rows import TrunkOutput, TrunkRows
from headstart.engine.engine import Engine
from headstart.engine.round_steps import RoundSteps
from headstart.sampling.params import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_kernels")
_few_programs = pytest.fixture(autouse=True)(few_programs)

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("mimo", SIZES),
    "latents": ("deepseek_v3", LATENT),
    "recurrent": ("qwen3_5_text", {
        **SIZES, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 16, "linear_value_head_dim": 12, "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
    }),
}  # fmt: skip


class Even:
    """A grammar that allows even tokens."""

    def __init__(self, vocab: int):
        self._vocab = vocab

    def allowed(self) -> Tensor:
        return torch.arange(self._vocab) % 2 == 0

    def accept(self, token: int) -> bool:
        return token % 2 == 0

    def fork(self) -> Even:
        return self


FIRST, LATER = [5, 20, 31], [list(range(3, 40)), [9, 10, 11]]  # more than a group
PARAMS = [
    SamplingParams(temperature=0, max_tokens=7, ignore_eos=True),
    SamplingParams(temperature=0.6, seed=3, max_tokens=3, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=4, top_p=0.9, max_tokens=3, ignore_eos=True),
]


def answers(folder: Path, kernels: str) -> tuple[list[list[int]], Engine]:
    """Two requests come when the first has begun to decode."""
    engine = Engine(
        folder, dtype="float32", kernels=kernels, speculate=2, block_size=4, kv_bytes=1 << 20,
        max_batched_tokens=36, max_running_requests=3,
    )  # fmt: skip
    ids = [engine.add(FIRST, PARAMS[0])]
    for _ in range(2):
        engine.step()
    ids += [engine.add(prompt, own) for prompt, own in zip(LATER, PARAMS[1:], strict=True)]
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
    return [engine.collect(name).outputs[0].token_ids for name in ids], engine


def test_texts_are_the_same_where_prompts_join_in_parts(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where many decode, and some sizes of a pass cost less for each row than others."""
    variant, sizes = MODELS["dense"]
    folder = tiny(variant, rate=0.9, seed=1, dtype="F32", **sizes)
    wanted, _ = answers(folder, "off")
    monkeypatch.setattr(device_rounds, "_MANY_ROWS", 1)
    monkeypatch.setattr(device_rounds, "best_rows", lambda own, wanted, seconds: (wanted + 1) // 2)
    taken: list[int] = []
    run_packed = device_rounds.CapturedRounds._run_packed

    def watched(rounds: Any, part: Any, count: int, rows: list[TrunkRows]) -> TrunkOutput:
        taken.append(sum(len(own.tokens) for own in rows))
        return run_packed(rounds, part, count, rows)

    monkeypatch.setattr(device_rounds.CapturedRounds, "_run_packed", watched)
    found, engine = answers(folder, "on")
    assert found == wanted and engine.stats.prompt_tokens == 3 + 37 + 3
    assert taken[0] == 3 and taken[1] == 18 and sum(taken) == 3 + 37 + 3


def test_many_rows_of_prompts_have_a_pass_of_their_own(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where many decode, too: a part of them beside each round would be read later."""
    variant, sizes = MODELS["dense"]
    folder = tiny(variant, rate=0.9, seed=1, dtype="F32", **sizes)
    wanted, _ = answers(folder, "off")
    monkeypatch.setattr(device_rounds, "_MANY_ROWS", 1)
    monkeypatch.setattr(device_rounds, "MANY_PROMPT_ROWS", 30)
    monkeypatch.setattr(device_rounds, "MOST_GROUPS", 1)
    monkeypatch.setattr(device_rounds, "best_rows", lambda own, wanted, seconds: (wanted + 1) // 2)
    passes: list[int] = []
    trunk_pass = CudaBackend.trunk_pass

    def counted(backend: CudaBackend, requests: list[TrunkRows]) -> TrunkOutput:
        passes.append(sum(len(rows.tokens) for rows in requests))
        return trunk_pass(backend, requests)

    monkeypatch.setattr(CudaBackend, "trunk_pass", counted)
    found, engine = answers(folder, "on")
    assert found == wanted and engine.stats.prompt_tokens == 3 + 37 + 3
    assert passes[0] == 36, "as many rows as a pass may have"


@pytest.mark.parametrize("is_drafting", [True, False], ids=["while it drafts", "before that"])
def test_texts_are_made_while_a_round_drafts_and_else_after_its_masks(
    is_drafting: bool, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant, sizes = MODELS["dense"]
    folder = tiny(variant, rate=0.9, seed=1, dtype="F32", **sizes)
    done: list[str] = []
    take, choose = RoundSteps._take, device_rounds.CapturedRounds.choose

    def watched_take(*given: Any) -> Any:
        done.append("text")
        return take(*given)

    def watched_choose(*given: Any) -> None:
        done.append("masks")
        choose(*given)

    def texts(kernels: str) -> list[int]:
        engine = Engine(
            folder, dtype="float32", kernels=kernels, speculate=2, block_size=4, kv_bytes=1 << 20,
            max_running_requests=1,
        )  # fmt: skip
        name = engine.add(FIRST, PARAMS[0], grammar=Even(engine.backend.config.vocab))
        while engine.has_work:
            engine.step()
        return engine.collect(name).outputs[0].token_ids

    wanted = texts("off")
    monkeypatch.setattr(RoundSteps, "_take", watched_take)
    monkeypatch.setattr(device_rounds.CapturedRounds, "choose", watched_choose)
    monkeypatch.setattr(device_rounds.CapturedRounds, "is_drafting", lambda _: is_drafting)
    assert texts("on") == wanted and all(token % 2 == 0 for token in wanted)
    assert done[:2] == (["text", "masks"] if is_drafting else ["masks", "text"])


@long_only
@pytest.mark.parametrize("kind", list(MODELS))
def test_their_texts_are_those_of_the_plain_engine(
    kind: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant, sizes = MODELS[kind]
    folder = tiny(variant, rate=0.9, seed=1, dtype="F32", **sizes)
    passes: list[int] = []  # rows of passes beside rounds
    trunk_pass = CudaBackend.trunk_pass

    def counted(backend: CudaBackend, requests: list[TrunkRows]) -> TrunkOutput:
        passes.append(sum(len(rows.tokens) for rows in requests))
        return trunk_pass(backend, requests)

    wanted, _ = answers(folder, "off")
    monkeypatch.setattr(CudaBackend, "trunk_pass", counted)
    found, engine = answers(folder, "on")
    assert engine.backend.name == "cuda" and found == wanted
    assert (passes == []) is (kind == "dense"), "prompts were read within rounds, or like them"
    assert engine.stats.slow_rounds == {} and engine.stats.prompt_tokens == 3 + 37 + 3


@long_only
def test_texts_are_the_same_where_contexts_begin_alike(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What requests share of their prompts is read once for several of them."""
    variant, sizes = MODELS["dense"]
    folder = tiny(variant, rate=0.9, seed=1, dtype="F32", **sizes)
    shared, shares = list(range(3, 28)), []
    asked = [[*shared, 40 + number] for number in range(3)]
    given = [PARAMS[0], PARAMS[1], PARAMS[0]]

    def texts(kernels: str) -> list[list[int]]:
        engine = Engine(
            folder, dtype="float32", kernels=kernels, speculate=2, block_size=4, kv_bytes=1 << 20,
            max_running_requests=3,
        )  # fmt: skip
        engine.generate([[*shared, 50]], PARAMS[1])  # leaves the blocks that the others find
        found = engine.generate(asked, given)
        assert engine.stats.cached_tokens == 3 * 24
        return [result.outputs[0].token_ids for result in found]

    wanted = texts("off")
    monkeypatch.setattr(attending, "LEAST_SHARING", 2)
    monkeypatch.setattr(shared_prefix, "LEAST", 8)
    attend = attention.attend_shared

    def watched(*args: Any, **named: Any) -> Any:
        shares.append(args[4].tolist())
        return attend(*args, **named)

    monkeypatch.setattr(attention, "attend_shared", watched)
    assert texts("on") == wanted
    assert [24, 24, 24] in shares
