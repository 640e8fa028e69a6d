"""A trunk's digest: heads come and go, the trunk stays the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny_fixture import Tiny

from headstart.checkpoint.reader import Checkpoint
from headstart.heads.digest import trunk_digest
from headstart.heads.graft import plan_graft


def of(folder: Path) -> str:
    return trunk_digest(Checkpoint.open(folder))


def changed(source: Path, out: Path, part: str) -> Path:
    """A copy in which the last value of the first tensor called so is another one."""
    shutil.copytree(source, out)
    (file,) = out.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if part in name)
    tensors[name].view(-1)[-1] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    return out


@pytest.mark.parametrize("variant", ["mimo", "qwen3", "glm4_moe"])
def test_a_head_does_not_change_it(variant: str, tiny: Tiny) -> None:
    assert of(tiny(variant)) == of(tiny(variant, with_head=False))


def test_a_tuned_head_does_not_change_it_and_a_tuned_trunk_does(tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("mimo", dtype="F32")
    assert of(changed(source, tmp_path / "head", "mtp_layers.0.input_proj")) == of(source)
    assert of(changed(source, tmp_path / "trunk", "layers.1.mlp.down_proj")) != of(source)


@pytest.mark.parametrize("variant", ["llama", "qwen2"])
def test_grafting_does_not_change_it(variant: str, tiny: Tiny, tmp_path: Path) -> None:
    """A grafted Llama is called mimo and gets biases of zeros: the same trunk all the same."""
    source = tiny(variant, with_head=False)
    plan_graft(Checkpoint.open(source)).write(tmp_path / "grafted")
    assert of(tmp_path / "grafted") == of(source)


def test_a_field_that_changes_the_text_changes_it(tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("mimo")
    shutil.copytree(source, tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_theta": 123.0}))
    assert of(tmp_path / "m") != of(source)
