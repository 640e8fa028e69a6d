"""Latent attention: absorbed and unfolded queries see the same, with and without a cache."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.backends.torch.exact import ExactContext, OneRow
from headstart.errors import BadConfig, UnsupportedFamily
from headstart.models.attention import PagedContext, Span, empty_cache
from headstart.models.config_reader import model_config
from headstart.models.documents import Chain, Documents, Passage
from headstart.models.mla import LatentAttention
from headstart.models.mla_config import mla_config
from headstart.models.rope import RotaryTable, rope_config

RAW: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61, "rms_norm_eps": 1e-5,
    "q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6,
    "v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}  # fmt: skip
SIZES = mla_config(RAW)
ROWS, CPU = 30, torch.device("cpu")
ROTARY = RotaryTable(rope_config(RAW, SIZES.rope_dim, is_interleaved=True), 64, torch.float64)


def layer(**changes: Any) -> LatentAttention:
    """Weights do not depend on the changes, as long as sizes do not."""
    result = LatentAttention(32, 4, replace(SIZES, **changes)).double()
    draw = torch.Generator().manual_seed(0)
    for parameter in result.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    return result


def rows() -> Tensor:
    return torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def forced(is_few: bool) -> LatentAttention:
    """One way only, whatever the number of rows."""
    result = layer()
    result._is_few = lambda part: is_few
    return result


def paged(net: LatentAttention, sizes: tuple[int, ...]) -> Tensor:
    """One text in chunks of these sizes, its slots in no order."""
    cache = empty_cache(((SIZES.entry,), (0,)), 40, torch.float64, CPU)
    places = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    x, done, found = rows(), 0, []
    for size in sizes:
        end = done + size
        span = Span(0, size, places[done:end], places[:end])
        at = ROTARY.at(torch.arange(done, end))
        found.append(net(x[done:end], at, PagedContext(cache, [span])))
        done = end
    return torch.cat(found)


@torch.inference_mode()
@pytest.mark.parametrize("sizes", [(30,), (1,) * 30, (11, 1, 7, 4, 1, 6)], ids=str)
def test_absorbed_and_unfolded_rows_are_equal(sizes: tuple[int, ...]) -> None:
    expected = paged(forced(is_few=False), (30,))
    for is_few in (True, False):
        found = paged(forced(is_few=is_few), sizes)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)


@torch.inference_mode()
def test_texts_with_many_and_with_few_rows_share_a_batch() -> None:
    net, x = layer(), rows()
    many = Documents((22, 8))
    passage = net(x, ROTARY.at(many.positions(CPU)), Passage(many))
    cache = empty_cache(((SIZES.entry,), (0,)), 40, torch.float64, CPU)
    spans = [Span(0, 22, slice(0, 22), slice(0, 22)), Span(22, 30, slice(30, 38), slice(30, 38))]
    net._is_few = lambda part: part.num_rows < 10
    found = net(x, ROTARY.at(many.positions(CPU)), PagedContext(cache, spans))
    torch.testing.assert_close(found, passage, atol=1e-12, rtol=1e-10)


@torch.inference_mode()
def test_rows_one_by_one_are_equal() -> None:
    net, expected = layer(), paged(layer(), (30,))
    net.one_by_one = True
    cache = empty_cache(((SIZES.entry,), (0,)), 40, torch.float64, CPU)
    places = [OneRow(slot, slice(0, slot + 1)) for slot in range(ROWS)]
    found = net(rows(), ROTARY.at(torch.arange(ROWS)), ExactContext(cache, places))
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)


def test_a_chain_sees_its_passage_and_itself_and_hands_gradients_back() -> None:
    """Row t of a chain is what a text has that ends after row t and goes on with the chain."""
    net, x, documents = layer(), rows(), Documents((19, 11))
    x.requires_grad_(True)
    later = torch.randn(2, ROWS, 32, generator=torch.Generator().manual_seed(3)).double()
    positions = documents.positions(CPU)
    passage = Passage(documents)
    net(x, ROTARY.at(positions), passage)
    chain = Chain(passage)
    found = [net(later[i], ROTARY.at(positions + i + 1), chain) for i in range(2)]
    for start, t in ((0, 0), (0, 7), (19, 19), (19, 29)):
        text = torch.cat([x[start : t + 1], later[:, t]])
        alone = Documents((len(text),))
        expected = net(text, ROTARY.at(alone.positions(CPU)), Passage(alone))
        for depth in range(2):
            torch.testing.assert_close(found[depth][t], expected[depth - 2], atol=1e-12, rtol=1e-9)
    (gradient,) = torch.autograd.grad(found[1][7].sum(), x)
    assert gradient[:8].abs().min() > 0 and gradient[8:].abs().max() == 0


@torch.inference_mode()
def test_int8_weights_leave_what_is_absorbed_alone() -> None:
    from headstart.backends.weights import Int8Linear, convert_weights

    net = layer().float()
    convert_weights(net, Int8Linear)
    assert isinstance(net.o, Int8Linear) and net.kv_up.dtype == torch.float32


def test_scores_are_scaled_twice_where_positions_are_stretched() -> None:
    plain, root = mla_config(RAW).scale, 16**-0.5
    yarn = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    stretched = mla_config({**RAW, "rope_scaling": yarn}).scale
    assert plain == root
    assert stretched == pytest.approx(root * (0.1 * math.log(40) + 1) ** 2)
    silent = {name: value for name, value in yarn.items() if name != "mscale_all_dim"}
    assert mla_config({**RAW, "rope_scaling": silent}).scale == root


def test_latents_are_unfolded_where_that_costs_less() -> None:
    released = replace(SIZES, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
    assert released.few_rows == 512 * 256 // (2 * 512 - 256)
    assert replace(released, kv_rank=100).few_rows == 0, "latents no smaller than what they hold"


def test_the_size_of_an_entry_is_that_of_one_latent_and_one_key() -> None:
    config = model_config(RAW)
    assert {config.kept(kind) for kind in config.layers} == {((16 + 6,), (0,))}
    assert config.kept(config.head_layer) == ((16 + 6,), (0,))


@pytest.mark.parametrize(
    "change", [{"kv_lora_rank": 0}, {"qk_rope_head_dim": 5}, {"q_lora_rank": "x"}], ids=str
)
def test_sizes_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BadConfig, match="expected whole numbers above 0"):
        model_config({**RAW, **change})


def test_biases_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedFamily, match="attention_bias is true"):
        model_config({**RAW, "attention_bias": True})
