"""A trunk's digest: heads come and go, the trunk stays the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.tiny_fixture import Tiny

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


def told(source: Path, out: Path, **fields: Any) -> Path:
    """A copy whose config says something else; None takes a field out."""
    shutil.copytree(source, out)
    path = out / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({n: v for n, v in config.items() if v is not None}))
    return out


@pytest.mark.parametrize(
    "fields",
    [{"rope_theta": 123.0}, {"rms_norm_eps": 1e-2}, {"max_window_layers": 1}, {"new_scale": 2.0},
     {"num_key_value_heads": 1}, {"eos_token_id": 5}],
    ids=lambda fields: next(iter(fields)),
)  # fmt: skip
def test_a_field_that_changes_the_text_changes_it(
    fields: dict[str, Any], tiny: Tiny, tmp_path: Path
) -> None:
    """Also one that is not known here."""
    source = tiny("mimo")
    assert of(told(source, tmp_path / "m", **fields)) != of(source)


def test_names_and_the_heads_own_fields_do_not(tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("mimo")
    silent = {
        "_name_or_path": "elsewhere", "transformers_version": "9", "torch_dtype": "float16",
        "num_nextn_predict_layers": 2, "mtp_new": 1, "use_cache": False,
    }  # fmt: skip
    assert of(told(source, tmp_path / "m", **silent)) == of(source)


def test_grafting_that_writes_down_defaults_does_not_change_it(tiny: Tiny, tmp_path: Path) -> None:
    bare = told(
        tiny("llama", with_head=False), tmp_path / "bare",
        head_dim=None, rms_norm_eps=None, max_position_embeddings=None,
    )  # fmt: skip
    plan_graft(Checkpoint.open(bare)).write(tmp_path / "grafted")
    assert of(tmp_path / "grafted") == of(bare)
