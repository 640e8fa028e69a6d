"""What a start compiles before it runs anything: every kernel of its rounds, each once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiny_fixture import Tiny

pytest.importorskip("triton")

from support.kernel_runs import start
from triton.runtime.interpreter import InterpretedFunction

from headstart.backends.cuda.compiling import thinned
from headstart.backends.cuda.decode_batch import DecodeBatch
from headstart.backends.cuda.device_rounds import CapturedRounds
from headstart.backends.cuda.rounds import RoundModel, run_round
from headstart.backends.cuda.shapes import RoundShape

Launch = tuple[str, tuple[Any, ...]]


def launches(batch: DecodeBatch, model: RoundModel, shape: RoundShape) -> list[Launch]:
    """Kernels of a round, and all that they are compiled for."""
    seen: list[Launch] = []

    def run(self: Any, *given: Any, grid: Any, warmup: bool, **fixed: Any) -> None:
        kinds = [value.dtype if isinstance(value, torch.Tensor) else value for value in given]
        seen.append((self.fn.__name__, (*map(str, kinds), *sorted(map(str, fixed.items())))))

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(InterpretedFunction, "run", run)
        run_round(model, batch, shape)
    return seen


@pytest.mark.parametrize("family", ["qwen3_next", "glm4_moe"])
def test_a_layer_of_each_kind_launches_what_all_layers_do(tiny: Tiny, family: str) -> None:
    engine = start(tiny(family, dtype="F32", num_hidden_layers=4), "on", kv_bytes=1 << 24)
    assert engine.loop.rounds is not None
    device = engine.loop.rounds._device
    assert isinstance(device, CapturedRounds)
    model, shape = device.graphs.model, RoundShape(2, 2, 3)
    thin = thinned(model)
    whole, found = (launches(device.batch, one, shape) for one in (model, thin))
    assert set(found) == set(whole) and len(found) < len(whole)
    assert len(model.trunk.layers) == 4 and len(thin.trunk.layers) == 2
    assert len(set(model.trunk.config.layers)) == 2
