"""Whole checkpoints that the reference packages wrote are read to the bit as they read them.

scripts/quantized_checkpoints.py made the fixtures: configs, lists and overrides are the packages'.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from headstart.checkpoint.quantized.stored import StoredWeight
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.values import as_bytes
from headstart.models.build import LoadedModel, build
from headstart.models.documents import Documents, Passage
from headstart.models.quantized import Fp8Linear, GroupLinear
from headstart.models.stored import trunk_tensors

FIXTURES = Path(__file__).parents[3] / "fixtures" / "quantized" / "whole"
NAMES = sorted(path.stem for path in FIXTURES.glob("*.safetensors"))
FOUR_BITS = ["auto-round", "gptqmodel", "llmcompressor"]
WHOLE = "model.layers.1.mlp.down_proj.weight"  # which the lists of these leave plain


def facts(name: str) -> tuple[dict[str, list[str]], torch.Tensor]:
    """By weight: the type in which its package dequantises it, and the SHA-256 of that; logits."""
    with safe_open(FIXTURES / f"{name}.safetensors", "pt") as file:
        return json.loads(file.metadata()["digests"]), file.get_tensor("logits")


def logits(model: LoadedModel) -> torch.Tensor:
    ids, documents = torch.arange(2, 20), Documents((18,))
    contexts = [Passage(documents) for _ in model.trunk.layers]
    with torch.inference_mode():
        states = model.trunk(ids, documents.positions(ids.device), contexts)
        return model.trunk.logits(model.trunk.final_norm(states))


def test_each_package_wrote_a_checkpoint() -> None:
    assert set(NAMES) == {*FOUR_BITS, "auto-round-fp8"}


@pytest.mark.parametrize("name", NAMES)
def test_every_weight_is_theirs_to_the_bit(name: str) -> None:
    checkpoint, (digests, _) = Checkpoint.open(FIXTURES / name), facts(name)
    notes: list[str] = []
    found = trunk_tensors(checkpoint, None, (), notes)
    stored = {key: weight for key, weight in found.items() if isinstance(weight, StoredWeight)}
    assert set(stored) == set(digests)
    assert all(note.startswith("scales of activations are not used") for note in notes)
    assert len(notes) == (1 if name == "auto-round-fp8" else 0)
    assert (WHOLE not in stored) == (name in FOUR_BITS), "the list or override is kept"
    for key, (dtype, digest) in digests.items():
        values = stored[key].values(getattr(torch, dtype.removeprefix("torch.")))
        # A product with a scale below 0 may be -0, theirs with the unit matrix is not.
        assert hashlib.sha256(as_bytes(values + 0.0)).hexdigest() == digest, key


@pytest.mark.parametrize("name", NAMES)
def test_they_run_as_they_are_stored(name: str) -> None:
    """Logits are those of transformers with the weights that the package dequantised."""
    _, wanted = facts(name)
    model = build(Checkpoint.open(FIXTURES / name), device="cpu", dtype="float32", with_head=False)
    kinds = {type(part) for part in model.trunk.modules()} & {Fp8Linear, GroupLinear}
    assert len(kinds) == (2 if name == "llmcompressor" else 1)
    assert not any("dequantised" in note for note in model.notes)
    # Theirs were rounded to 16 bits.
    assert (logits(model) - wanted).norm() < 0.02 * wanted.norm()
    assert wanted.std() > 0.1, "the control: they are not all alike"
