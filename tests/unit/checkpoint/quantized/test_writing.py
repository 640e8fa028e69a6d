"""What `calibrate --weights` holds while a shard is written, and which matrices it takes."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from support.quantized_tensors import source

from headstart.checkpoint.dtypes import DTYPE_BITS
from headstart.checkpoint.quantized.writing import FORMATS, stored_in
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.values import load
from headstart.errors import ConfigError
from headstart.heads.quantized_copy import quantized_copy

SHAPE, COUNT = (256, 256), 5


@pytest.mark.parametrize("name", FORMATS)
def test_codes_of_a_shard_are_not_held_until_its_scales_are_written(name: str) -> None:
    form = FORMATS[name]
    alive: list[weakref.ref[torch.Tensor]] = []

    def counted(values: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
        made = form.make(values, group)
        alive.extend(weakref.ref(tensor) for tensor in made.values())
        return made

    def held() -> int:
        found = [tensor for ref in alive if (tensor := ref()) is not None]
        return sum(tensor.untyped_storage().nbytes() for tensor in found)

    sources: dict[str, TensorSource] = {}
    draw = torch.Generator().manual_seed(0)
    for number in range(COUNT):
        plain = source(torch.randn(SHAPE, generator=draw))
        sources.update(stored_in(replace(form, make=counted), f"m{number}", plain, 32))
    codes = max(tensor.num_bytes for tensor in sources.values())
    small = sum(tensor.num_bytes for tensor in sources.values()) - COUNT * codes
    most, written = 0, {}
    for key in sorted(sources, key=lambda n: (-DTYPE_BITS[sources[n].dtype], n)):  # as files are
        written[key] = load(sources[key])
        most = max(most, held())
    assert most <= small + codes and held() == 0
    again = {key: load(tensor) for key, tensor in sources.items()}
    assert all(torch.equal(again[k].float(), written[k].float()) for k in written)


def copied(shapes: dict[str, tuple[int, int]], weights: str) -> dict[str, TensorSource]:
    tensors = {
        f"model.layers.0.self_attn.{name}.weight": source(torch.ones(shape))
        for name, shape in shapes.items()
    }
    return quantized_copy({"model_type": "none"}, tensors, weights)[1]


def test_a_matrix_that_stays_plain_has_no_say_about_the_group() -> None:
    shapes = {"q_proj": (16, 128), "k_proj": (4, 96)}
    at = "model.layers.0.self_attn"
    assert copied(shapes, "awq")[f"{at}.q_proj.scales"].shape == (1, 16)
    assert copied(shapes, "awq")[f"{at}.k_proj.weight"].shape == (4, 96)
    # compressed-tensors packs along rows, so any number of them fits.
    packed = copied(shapes, "compressed-tensors")
    assert packed[f"{at}.k_proj.weight_scale"].shape == (4, 3)
    with pytest.raises(ConfigError, match="no projection of the model can be quantised"):
        copied({"k_proj": (4, 96)}, "gptq")
