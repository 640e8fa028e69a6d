"""Heads in folders for vLLM: what they hold, the way back, and our engine with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import headstart
from support.engine_runs import assert_head_is_alive, greedy, ids_of, make_prompts, run, start
from support.head_edits import tensors
from support.tiny_fixture import Tiny

from headstart.checkpoint.values import load
from headstart.errors import ConfigError, LaunchError, UnsupportedFamily
from headstart.families.registry import family as family_named
from headstart.heads.experts import split_experts
from headstart.heads.export import plan_convert, plan_export
from headstart.heads.formats import format_of, head_in, open_any, open_head, open_model
from headstart.heads.formats.vllm import PLUGIN, STOCK, VOCAB_FILE, check_folder_name, plan
from headstart.heads.inspection import inspect
from headstart.launch import LaunchOptions, build
from headstart.vocab.draft_vocab import DraftVocab
from headstart.vocab.files import read, write

WIDE = {"head_dim": 32}


def exported(model: Path, out: Path, **options: Any) -> Path:
    plan_export(head_in(open_model(model)), "vllm", **options).write(out)
    return out


def config_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "mimo"])
def test_a_head_that_vllms_class_fits_is_written_for_it(
    family: str, tiny: Tiny, tmp_path: Path
) -> None:
    model = tiny(family)
    head = exported(model, tmp_path / "head")
    config, found = config_of(head), tensors(head)
    assert config["architectures"] == [STOCK]
    assert config["model_type"] == "qwen2" and "auto_map" not in config
    assert all(name.startswith("model.mtp_layers.0.") for name in found)
    assert "model.mtp_layers.0.self_attn.q_proj.bias" in found
    original = {name: source for name, source in open_head(model).tensors.items()}
    assert format_of(open_any(head)) == "vllm"
    plan_convert(open_head(head), "headstart").write(tmp_path / "back")
    plan_export(head_in(open_model(model)), "headstart").write(tmp_path / "direct")
    back, direct = tensors(tmp_path / "back"), tensors(tmp_path / "direct")
    assert back.keys() == direct.keys() == original.keys()
    assert all(torch.equal(back[name], direct[name]) for name in direct)


def test_qwen3s_fusion_is_written_the_other_way_round(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("qwen3")
    found = tensors(exported(model, tmp_path / "head"))
    embed, hidden = tensors(model)["mtp.fc.weight"].chunk(2, dim=1)
    assert torch.equal(found["model.mtp_layers.0.input_proj.weight"], torch.cat([hidden, embed], 1))
    assert not found["model.mtp_layers.0.self_attn.k_proj.bias"].any()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "mimo"])
def test_another_geometry_is_written_for_our_own_class(
    family: str, tiny: Tiny, tmp_path: Path
) -> None:
    head = exported(tiny(family, **WIDE), tmp_path / "head")
    config = config_of(head)
    assert config["architectures"] == [PLUGIN] and config["model_type"] == "mtp"
    assert config["headstart_head"] == {"family": family}
    assert all(name.startswith("modules.0.") for name in tensors(head))


@pytest.mark.parametrize("is_fused", [False, True])
def test_ling_2_is_written_for_our_own_class(is_fused: bool, tiny: Tiny, tmp_path: Path) -> None:
    """vLLM runs its trunk and has no class for its head, whose block has experts."""
    model = tiny("bailing_moe_v2", fused_experts=is_fused)
    head = exported(model, tmp_path / "head")
    config, found = config_of(head), tensors(head)
    assert config["architectures"] == [PLUGIN]
    assert config["headstart_head"] == {"family": "bailing_moe"}
    own = split_experts(open_head(model).tensors)
    assert set(found) == set(own) == set(family_named("bailing_moe").expected(config, 1))
    assert all(torch.equal(found[name], load(source)) for name, source in own.items())
    plan_convert(open_head(head), "headstart").write(tmp_path / "back")
    back = tensors(tmp_path / "back")
    assert back.keys() == found.keys()
    assert all(torch.equal(back[name], found[name]) for name in found)
    with pytest.raises(UnsupportedFamily, match="reads heads of bailing_hybrid inside their model"):
        plan(replace(open_head(head), config={**config, "model_type": "bailing_hybrid"}))


def test_launch_gives_ling_2_a_head_in_a_folder(tiny: Tiny, tmp_path: Path) -> None:
    head = exported(tiny("bailing_moe_v2"), tmp_path / "head")
    trunk = tiny("bailing_moe_v2", with_head=False)
    built = launched(trunk, head, speculate=2)
    assert value(built, "--speculative-config")["model"] == str(head)
    assert any("Headstart's plugin brings the class" in note for note in built.notes)
    with pytest.raises(LaunchError, match=r"needs vLLM 0\.26\.0 or later"):
        launched(trunk, head, "0.25.0")
    with pytest.raises(LaunchError, match="Launch the trunk that the head was grafted onto"):
        launched(tiny("bailing_moe_v2"), head)


def test_a_plain_head_of_a_quantised_trunk_needs_our_class(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("qwen3", quantization_config={"quant_method": "fp8", "ignored_layers": ["mtp"]})
    config = config_of(exported(model, tmp_path / "head"))
    assert config["architectures"] == [PLUGIN] and "quantization_config" not in config


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("changes", [{}, WIDE], ids=["vLLM's class", "ours"])
def test_our_engine_drafts_with_the_folder_as_with_the_model(
    changes: dict[str, Any], family: str, tiny: Tiny, tmp_path: Path
) -> None:
    model = tiny(family, dtype="F32", **changes)
    trunk = tiny(family, dtype="F32", with_head=False, **changes)
    head = exported(model, tmp_path / "head")
    prompts = make_prompts(3)
    inside = run(start(model, speculate=2), prompts, greedy())
    beside = run(start(trunk, head=head, speculate=2), prompts, greedy())
    assert ids_of(inside) == ids_of(beside)
    assert [r.stats.acceptance for r in inside] == [r.stats.acceptance for r in beside]
    assert_head_is_alive(beside)


def test_a_draft_vocabulary_lies_beside_the_head(tiny: Tiny, tmp_path: Path) -> None:
    write([DraftVocab(ids=(1, 2, 5), vocab_size=128)], tmp_path / "v.json")
    head = exported(tiny("qwen3"), tmp_path / "head", draft_vocab=str(tmp_path / "v.json"))
    assert config_of(head)["headstart"] == {"draft_vocab": VOCAB_FILE}
    assert read(head / VOCAB_FILE)[0].ids == (1, 2, 5)


def test_heads_that_vllm_reads_inside_their_model_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFamily, match="headstart stitch"):
        exported(tiny("glm4_moe"), tmp_path / "head")


@pytest.mark.parametrize("name", ["EAGLE-mine", "my_eagle3", "dflash", "a/DSpark/b"])
def test_names_that_vllm_misreads_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="another name"):
        check_folder_name(name)
    check_folder_name("beagle/eagle_2")


def test_export_and_convert_refuse_such_a_name_before_they_write(
    tiny: Tiny, tmp_path: Path
) -> None:
    model, out = str(tiny("qwen3")), tmp_path / "eagle3-x"
    for words in (("export", model, "--format"), ("convert", model, "--to")):
        done = headstart(*words, "vllm", "--out", str(out))
        assert done.returncode == 2 and "eagle3" in done.stderr
        assert not out.exists()


def launched(trunk: Path, head: Path | None, version: str = "0.32.0", **options: Any) -> Any:
    found = inspect(open_model(trunk))
    return build("vllm", found, LaunchOptions(head=head, **options), version)


def value(built: Any, flag: str) -> Any:
    return json.loads(built.argv[built.argv.index(flag) + 1])


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_launch_adds_what_vllms_class_asks_of_the_trunks_config(
    family: str, tiny: Tiny, tmp_path: Path
) -> None:
    head = exported(tiny(family), tmp_path / "head")
    trunk = tiny(family, with_head=False)
    built = launched(trunk, head, speculate=2)
    assert value(built, "--speculative-config") == {
        "method": "mtp", "model": str(head), "num_speculative_tokens": 2,
    }  # fmt: skip
    assert value(built, "--hf-overrides") == {"num_nextn_predict_layers": 1, "qk_norm": True}
    assert any("no plugin is needed" in note for note in built.notes)
    with pytest.raises(LaunchError, match=r"needs vLLM 0\.26\.0 or later"):
        launched(trunk, head, "0.25.0")
    with pytest.raises(ConfigError, match="--hf-overrides"):
        launched(trunk, head, extra="--hf-overrides '{}'")


def test_launch_names_the_plugin_where_it_is_needed(tiny: Tiny, tmp_path: Path) -> None:
    head = exported(tiny("mimo", **WIDE), tmp_path / "head")
    trunk = tiny("llama", **WIDE)
    built = launched(trunk, head)
    assert "--hf-overrides" not in built.argv
    assert any("Headstart's plugin brings the class" in note for note in built.notes)
    with pytest.raises(LaunchError, match="too new"):
        launched(trunk, head, "0.33.0")


def test_launch_says_how_a_head_inside_the_model_gets_out(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("qwen3")
    with pytest.raises(LaunchError, match=r"headstart export .* --format vllm"):
        launched(model, None)
    head = exported(model, tmp_path / "head")
    with pytest.raises(LaunchError, match="Launch the trunk that the head was grafted onto"):
        launched(model, head)
    plan_export(head_in(open_model(model)), "headstart").write(tmp_path / "ours")
    with pytest.raises(LaunchError, match="--to vllm"):
        launched(tiny("qwen3", with_head=False), tmp_path / "ours")
