"""Matrices that the reference packages stored are read to the bit as those packages read them.

scripts/quantized_fixtures.py made the fixtures; each file says by which package and function.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from support.quantized_tensors import source

from headstart.checkpoint.quantized.reading import quantized_weights
from headstart.checkpoint.quantized.stored import StoredWeight

FIXTURES = Path(__file__).parents[3] / "fixtures" / "quantized"
NAMES = sorted(path.stem for path in FIXTURES.glob("*.safetensors"))
READ_AS_VALUES = ("fp4", "mx", "16x24")  # parts of names


def stored(name: str) -> tuple[StoredWeight, torch.Tensor, str]:
    path = FIXTURES / f"{name}.safetensors"
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        facts = file.metadata()
    expected = tensors.pop("expected")
    sources = {key: source(tensor) for key, tensor in tensors.items()}
    found = quantized_weights(sources, json.loads(facts["quantization_config"]))
    assert list(found) == ["linear.weight"]
    return found["linear.weight"], expected, facts["made_by"]


def test_every_format_has_a_fixture_of_a_named_package() -> None:
    assert len(NAMES) >= 28
    makers = {stored(name)[2].split()[0] for name in NAMES}
    assert makers == {"compressed-tensors", "auto-round", "gptqmodel", "transformers"}


@pytest.mark.parametrize("name", NAMES)
def test_values_are_theirs_to_the_bit(name: str) -> None:
    weight, expected, made_by = stored(name)
    found = weight.values(expected.dtype)
    assert weight.shape == tuple(expected.shape) and expected.unique().numel() > 30, made_by
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16)), made_by


@pytest.mark.parametrize(
    "name", [name for name in NAMES if not any(part in name for part in READ_AS_VALUES)]
)
def test_what_the_engine_holds_gives_the_same_values(name: str) -> None:
    weight, expected, made_by = stored(name)
    held = weight.quantized()
    assert held.form == weight.form
    assert torch.equal(held.dequantized(expected.dtype), expected), made_by


@pytest.mark.parametrize("name", [name for name in NAMES if "gptq" in name or "awq" in name])
def test_in_bf16_the_exact_product_is_rounded_once(name: str) -> None:
    weight, _, _ = stored(name)
    exact = weight.values(torch.float64)  # codes times a scale of 11 bits: nothing is rounded
    assert torch.equal(exact.float().double(), exact)
    assert torch.equal(weight.values(torch.bfloat16), exact.float().bfloat16())
