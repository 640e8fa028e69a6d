"""Whole rounds through the kernels against the plain engine; on the CPU interpreted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_fixture import Tiny

pytest.importorskip("triton")

from headstart.backends.cuda.decode_batch import DecodeBatch
from headstart.backends.cuda.round_model import DraftTokens, RoundModel
from headstart.backends.cuda.rounds import run_round
from headstart.backends.cuda.shapes import RoundShape
from headstart.backends.cuda.support import why_unsupported
from headstart.backends.rounds import RoundRequest
from headstart.calibrate.tiny_configs import TINY_CONFIGS
from headstart.checkpoint.reader import Checkpoint
from headstart.engine.engine import Engine
from headstart.models.attention import LayerCache, PagedContext, Span
from headstart.models.build import LoadedModel, build
from headstart.models.config import LayerKind
from headstart.models.config_reader import model_config
from headstart.models.moe_config import Limit
from headstart.sampling.choose import choose
from headstart.sampling.params import Row, SamplingParams, derive_seed

pytestmark = pytest.mark.usefixtures("quick_kernels")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE, BLOCKS, TOKENS = 4, 8, 6
PROMPTS = [[3, 4, 5, 6, 7, 8, 9], [5, 20, 31]]
# Interpreted programs take milliseconds each, so everything is as small as it can be.
SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64,
}  # fmt: skip

Plan = list[tuple[int, int]]  # drafts and head rows of the rounds, again and again


class Rig:
    """A batch filled by a plain reading of the prompts."""

    def __init__(self, folder: Path, num_drafts: int, *, plan: Plan | None = None):
        self.built: LoadedModel = build(
            Checkpoint.open(folder), device=DEVICE, dtype="float32", with_head=num_drafts > 0
        )
        trunk, head = self.built.trunk, self.built.head
        config = self.built.config
        shape = (len(PROMPTS) * BLOCKS * PAGE, config.num_kv_heads, config.head_dim)

        def cache() -> LayerCache:
            return LayerCache(*(torch.zeros(shape, device=DEVICE) for _ in range(2)))

        self.model = RoundModel(
            trunk, head, [cache() for _ in range(config.num_layers)],
            [cache()] if head is not None else [],
            torch.zeros(shape[0] // PAGE, 1, config.hidden, device=DEVICE), PAGE,
            [DraftTokens((trunk.lm_head,))], BLOCKS * PAGE, feeds_stream=False,
        )  # fmt: skip
        self.batch = DecodeBatch(
            4, max_drafts=num_drafts, window=4, max_blocks=BLOCKS, hidden=config.hidden,
            vocab=config.vocab, dtype=torch.float32, device=torch.device(DEVICE),
        )  # fmt: skip
        self.num_drafts = num_drafts
        self._plan = plan or [(num_drafts, num_drafts + 1 if num_drafts else 0)]
        self.counts: list[int] = []  # tokens of each request and round

    @torch.inference_mode()
    def admit(self, at: int, prompt: list[int], params: SamplingParams, seed: int) -> int:
        """Read a prompt with the plain modules; returns its first token."""
        model, size = self.model, len(prompt)
        first = at * BLOCKS * PAGE
        span = Span(0, size, slice(first, first + size), slice(first, first + size))
        stream = model.trunk(
            torch.tensor(prompt, device=DEVICE), torch.arange(size, device=DEVICE),
            [PagedContext(cache, [span]) for cache in model.caches],
        )  # fmt: skip
        normed = model.trunk.final_norm(stream)
        row = Row(params=params, seed=seed, position=size)
        token = int(choose(model.trunk.logits(normed[-1:]), [row])[0])
        if model.head is not None and size > 1:
            ahead = slice(first + 1, first + size)
            model.head.module(1)(
                model.trunk.embed[prompt[1:]], normed[:-1], torch.arange(size - 1, device=DEVICE),
                model.trunk.rotary,
                PagedContext(model.head_caches[0], [Span(0, size - 1, ahead, ahead)]),
            )  # fmt: skip
        request = RoundRequest(
            num_tokens=size + 1, remaining=TOKENS - 1, newest=torch.tensor(token, device=DEVICE),
            states=normed[-1:], row=Row(params, seed, size + 1, prompt, (), 1),
            blocks=range(at * BLOCKS, (at + 1) * BLOCKS),
        )  # fmt: skip
        self.batch.admit(at, request)
        self.batch.limit([self.num_drafts] * (at + 1))
        return token

    @torch.inference_mode()
    def finish(self, first: list[int]) -> tuple[list[list[int]], int]:
        texts, rounds, self.counts = [[token] for token in first], 0, []
        while any(len(text) < TOKENS for text in texts):
            shape = RoundShape(len(texts), *self._plan[rounds % len(self._plan)])
            run_round(self.model, self.batch, shape)
            for text, row in zip(texts, self.batch.emitted.tolist(), strict=False):
                text += row[1 : 1 + row[0]]
                self.counts.append(row[0])
            rounds += 1
            assert rounds < 3 * TOKENS
        return texts, rounds


def plain(folder: Path, params: list[SamplingParams]) -> list[list[int]]:
    engine = Engine(folder, device=DEVICE, dtype="float32", speculate=0, kv_bytes=1 << 22)
    return [r.outputs[0].token_ids for r in engine.generate(PROMPTS, params)]


@pytest.mark.parametrize(("family", "num_drafts"), [("mimo", 0), ("mimo", 2), ("qwen3", 1)])
def test_rounds_give_the_text_of_plain_decoding(tiny: Tiny, family: str, num_drafts: int) -> None:
    settings: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.5, "seed": 5}]
    params = [SamplingParams(max_tokens=TOKENS, ignore_eos=True, **s) for s in settings]
    folder = tiny(family, rate=0.8, seed=1, dtype="F32", **SIZES)
    rig = Rig(folder, num_drafts)
    assert why_unsupported(rig.model.trunk.config) is None
    seeds = [derive_seed(p.seed or 0, 0) for p in params]
    first = [rig.admit(i, PROMPTS[i], params[i], seeds[i]) for i in range(len(PROMPTS))]
    texts, rounds = rig.finish(first)
    assert texts == plain(folder, params)
    if num_drafts:
        assert min(rig.counts) < max(rig.counts), "the head proves nothing"
    if num_drafts == 0:
        assert rounds == TOKENS - 1


def test_the_head_may_fall_behind_and_catch_up(tiny: Tiny) -> None:
    params = [SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)] * 2
    folder = tiny("mimo", rate=0.9, seed=1, dtype="F32", **SIZES)
    lazy = Rig(folder, 2, plan=[(0, 0), (0, 0), (2, 4)])
    first = [lazy.admit(i, PROMPTS[i], params[i], 0) for i in range(2)]
    texts, _ = lazy.finish(first)
    assert texts == plain(folder, params)
    eager = Rig(folder, 2, plan=[(0, 4), (0, 4), (2, 4)])
    assert eager.finish([eager.admit(i, PROMPTS[i], params[i], 0) for i in range(2)])[0] == texts
    assert lazy.counts == eager.counts and max(lazy.counts) > 1


def test_a_request_may_change_its_index_and_others_may_leave(tiny: Tiny) -> None:
    params = [SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)] * 2
    folder = tiny("mimo", rate=0.8, seed=1, dtype="F32", **SIZES)
    rig = Rig(folder, 2)
    first = [rig.admit(i, PROMPTS[i], params[i], 0) for i in range(2)]
    with torch.inference_mode():
        run_round(rig.model, rig.batch, RoundShape(2, 2, 3))
        row = rig.batch.emitted[1].tolist()
        rig.batch.move(1, 0)
        text = [first[1], *row[1 : 1 + row[0]]]
        while len(text) < TOKENS:
            run_round(rig.model, rig.batch, RoundShape(2, 2, 3))
            row = rig.batch.emitted[0].tolist()
            text += row[1 : 1 + row[0]]
            assert rig.batch.emitted[1, 0] == 0
    assert text == plain(folder, params)[1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"v_dim": 80}, "values have 80 numbers and its keys 64"), ({"o_bias": True}, "biases"),
        ({"head_layer": LayerKind(limit=Limit(7.0, is_before=True))}, "before their activation"),
        ({"head_layer": LayerKind(norms="after")}, "norms what attention and MLPs give"),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_kernels_do_not_compute_is_refused(changes: dict[str, Any], reason: str) -> None:
    """Regression: a model with values of their own scale was taken, and computed without it."""
    config = model_config(TINY_CONFIGS["mimo"])
    assert why_unsupported(config) is None
    assert reason in str(why_unsupported(replace(config, **changes)))
