"""With `exact` a row's bits do not depend on how many rows are run with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_runs import assert_head_is_alive, greedy, ids_of, make_prompts, run, soft, start
from support.tiny_fixture import Tiny

from headstart.backends.torch.exact import BLOCK_ROWS, is_invariant
from headstart.engine.engine import Engine
from headstart.engine.scheduler import Work
from headstart.errors import ConfigError
from headstart.models.linear import PRODUCTS
from headstart.sampling.params import SamplingParams

# large enough that libraries choose other kernels for other numbers of rows
SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 384, "vocab_size": 512, "head_dim": 32,
    "num_hidden_layers": 2,
}  # fmt: skip
PROMPT = [5 + 3 * i for i in range(30)]


def engine_of(tiny: Tiny, **settings: Any) -> Engine:
    folder = soft(tiny, "qwen3", **SIZES)
    options = {"dtype": "float32", "kv_bytes": 1 << 22, "speculate": 3, **settings}
    return Engine(folder, device="cpu", **options)


def logits_by_rows(engine: Engine) -> list[torch.Tensor]:
    """Of the newest token's row, verified together with 0 to 7 drafts and with another request."""
    name = engine.add(PROMPT, greedy(60))
    engine.add(PROMPT[:11], greedy(60))
    while any(not request.is_decoding for request in engine.scheduler.running) or (
        engine.scheduler.waiting
    ):
        engine.step()
    one, other = engine.scheduler.running
    assert one.id.startswith(name)
    found = []
    with torch.inference_mode():
        for drafts in range(8):
            assert engine.scheduler.look_ahead(one, drafts) == drafts
            work = Work(one, one.num_computed, 1 + drafts, (7,) * drafts)
            rows = work.rows(feeds_head=True)
            found.append(engine.backend.trunk_pass([rows])[1][0])
            beside = Work(other, other.num_computed, 1, ()).rows(feeds_head=True)
            found.append(engine.backend.trunk_pass([beside, rows])[1][1])
    return found


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_row_has_the_same_bits_beside_any_number_of_others(dtype: str, tiny: Tiny) -> None:
    first, *others = logits_by_rows(engine_of(tiny, exact=True, dtype=dtype))
    assert all(torch.equal(first, other) for other in others)


def test_without_exact_the_bits_depend_on_the_number_of_rows(tiny: Tiny) -> None:
    """The control: if this ever fails, this machine's products are exact by themselves."""
    first, *others = logits_by_rows(engine_of(tiny, kernels="off"))
    assert not all(torch.equal(first, other) for other in others)


def test_the_way_a_prompt_is_cut_does_not_show_in_the_bits(tiny: Tiny) -> None:
    seen = []
    for rows, size in ((64, 16), (3, 16), (8, 4), (1, 1)):
        engine = engine_of(tiny, exact=True, max_batched_tokens=rows, block_size=size)
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3)
        (result,) = engine.generate([PROMPT], params)
        assert result.outputs[0].logprobs is not None
        seen.append([(entry.logprob, entry.top) for entry in result.outputs[0].logprobs])
    assert all(other == seen[0] for other in seen)


def test_sampled_text_is_the_same_for_every_k_in_fp32(tiny: Tiny) -> None:
    params = SamplingParams(temperature=1.3, seed=4, max_tokens=30, ignore_eos=True, top_p=0.97)
    prompts = [[t % 512 for t in prompt] for prompt in make_prompts()]
    plain = engine_of(tiny, exact=True, speculate=0)
    expected = ids_of([plain.generate([prompt], params)[0] for prompt in prompts])
    for drafts in (2, 5):
        engine = engine_of(tiny, exact=True, speculate=drafts, max_batched_tokens=20)
        results = run(engine, prompts, params)
        assert_head_is_alive(results)
        assert ids_of(results) == expected


def test_exact_follows_sliding_windows_and_scattered_blocks(tiny: Tiny) -> None:
    """Equal to the usual path up to rounding: the same slots are attended to."""
    folder = soft(tiny, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    settings: dict[str, Any] = {"speculate": 3, "slots": 120, "max_batched_tokens": 9}
    usual = run(start(folder, **settings), make_prompts(), greedy())
    exact = run(start(folder, exact=True, **settings), make_prompts(), greedy())
    assert_head_is_alive(exact)
    assert ids_of(exact) == ids_of(usual)


def test_a_product_whose_rows_depend_on_their_place_is_not_taken() -> None:
    weight = torch.randn(24, 16, generator=torch.Generator().manual_seed(1))

    def by_place(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return PRODUCTS["rows"](x, weight) * (1 + torch.arange(len(x))[:, None] * 1e-6)

    assert not is_invariant(by_place, weight)
    assert is_invariant(PRODUCTS["single"], weight)
    x = torch.randn(BLOCK_ROWS, 16)
    assert torch.allclose(PRODUCTS["single"](x, weight), x @ weight.T, atol=1e-5)


@pytest.mark.parametrize(
    "settings", [{"weights": "int8"}, {"dtype": "bfloat16"}], ids=["int8", "bfloat16"]
)
def test_exact_is_refused_where_it_cannot_be_kept(
    settings: dict[str, Any], tiny: Tiny, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="exact"):
        engine_of(tiny, exact=True, **settings)
