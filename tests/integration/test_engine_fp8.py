"""fp8 weights through the whole engine, interpreted on the CPU and so as small as can be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.engine_runs import assert_head_is_alive, ids_of
from support.kernel_runs import SIZES
from support.tiny_fixture import Tiny

pytest.importorskip("triton")

from headstart.backends.cuda.fp8 import KernelFp8Linear
from headstart.engine.engine import Engine
from headstart.errors import ConfigError
from headstart.models.linear import Linear
from headstart.sampling.params import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_kernels")

# The second has more rows than the skinny kernels take.
PROMPTS = [[33, 11, 60], list(range(2, 22))]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=4, top_k=6, max_tokens=3, ignore_eos=True),
]


def start(tiny: Tiny, weights: str = "fp8", **settings: Any) -> Engine:
    folder = tiny("mimo", rate=0.9, seed=1, dtype="F32", **SIZES)
    options: dict[str, Any] = {
        "kernels": "on",
        "block_size": 4,
        "kv_bytes": 1 << 16,
        "max_model_len": 32,
    }
    return Engine(folder, device="cpu", dtype="float32", weights=weights, **{**options, **settings})


def test_drafts_change_nothing_and_the_head_is_alive(tiny: Tiny) -> None:
    wanted = ids_of(start(tiny, speculate=0).generate(PROMPTS, PARAMS))
    found = start(tiny, speculate=3).generate(PROMPTS[:1], PARAMS[:1])
    assert ids_of(found) == wanted[:1]
    assert_head_is_alive(found)
    reduced = start(tiny, speculate=1, draft_vocab=list(range(0, 64, 2)))
    assert ids_of(reduced.generate(PROMPTS[1:], PARAMS[1:])) == wanted[1:]


def test_every_product_is_fp8_and_nothing_else_is(tiny: Tiny) -> None:
    engine = start(tiny)
    trunk, head = engine.model.trunk, engine.model.head
    assert head is not None
    products = [m for part in (trunk, head) for m in part.modules() if isinstance(m, Linear)]
    assert all(isinstance(product, KernelFp8Linear) for product in products)
    assert len(products) == 4 + 1 + 1 + 4  # a layer, LM head; fuse, block
    assert trunk.embed.dtype == trunk.final_norm.weight.dtype == torch.float32


def test_logits_are_rounded_a_little(tiny: Tiny) -> None:
    rounded, plain = start(tiny, speculate=0), start(tiny, "as-dtype", speculate=0)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    found, wanted = (e.model.trunk.logits(x) for e in (rounded, plain))
    error = (found - wanted).norm() / wanted.norm()
    assert 0.001 < error < 0.05


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kernels": "auto"}, "weights fp8 is a GPU format; use weights int8 on a CPU"),
        ({"kernels": "off"}, "weights fp8 and kernels off were both given"),
        ({"exact": True}, "exact and weights fp8 were both given"),
    ],
    ids=["cpu", "kernels off", "exact"],
)
def test_where_fp8_does_not_run(tiny: Tiny, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start(tiny, **settings)
