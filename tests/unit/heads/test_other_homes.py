"""Heads in folders of TensorRT-LLM and MLX, and in those that transformers saves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.head_edits import differing, export, restore, tensors
from support.tiny_fixture import Tiny

from headstart.checkpoint.values import load
from headstart.errors import (
    BadConfig,
    ConfigError,
    HeadNotFound,
    UnexpectedTensor,
    UnsupportedFamily,
)
from headstart.heads.export import plan_export
from headstart.heads.formats import format_of, open_any, open_head


@pytest.mark.parametrize("name", ["qwen3_5_moe", "nemotron_h"])
def test_a_head_for_tensorrt_llm_comes_back_with_every_bit(
    name: str, tiny: Tiny, tmp_path: Path
) -> None:
    out = export(tiny(name), "trtllm", tmp_path / "head")
    assert all(each.startswith("mtp.") for each in tensors(out))
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert format_of(open_any(out)) == "trtllm"
    again = restore(tiny(name, with_head=False), out, tmp_path / "restored")
    assert differing(tensors(again), tensors(tiny(name))) == set()


def test_a_prefix_of_published_names_is_put_back(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("qwen3_5_moe_text", root="model.")
    head = open_head(export(model, "trtllm", tmp_path / "head"))
    assert head.root == "model." and all(n.startswith("mtp.") for n in head.origin.tensors)


def test_heads_of_other_names_are_refused_for_tensorrt_llm(tiny: Tiny) -> None:
    for name, said in (("deepseek_v3", "have other names"), ("mimo", "does not serve")):
        with pytest.raises(UnsupportedFamily, match=said):
            plan_export(open_head(tiny(name)), "trtllm")


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_a_drafter_for_mlx_has_its_names_and_norms(name: str, tiny: Tiny, tmp_path: Path) -> None:
    model = tiny(name)
    out = export(model, "mlx", tmp_path / "mlx")
    made = load_file(out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["block_size"]) == ("qwen3_5_mtp", 3)
    assert config["text_config"]["hidden_size"] == 256
    raw = {n.removeprefix("mtp."): v for n, v in tensors(model).items() if n.startswith("mtp.")}
    for each in ("fc.weight", "layers.0.self_attn.q_proj.weight"):
        assert torch.equal(made[each], raw[each])
    for each in ("norm.weight", "layers.0.self_attn.k_norm.weight"):
        expected = (raw[each].float() + 1).to(torch.bfloat16)
        assert torch.equal(made[each], expected)
    stacks = [n for n in made if "switch_mlp" in n]
    assert len(stacks) == (0 if name == "qwen3_5" else 3)
    if stacks:
        up = made["layers.0.mlp.switch_mlp.up_proj.weight"]
        assert torch.equal(up[2], raw["layers.0.mlp.experts.2.up_proj.weight"])


def test_a_drafter_of_mlx_comes_back_but_for_rounded_norms(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("qwen3_5_moe", fused_experts=True)
    out = export(model, "mlx", tmp_path / "mlx")
    head, original = open_head(out), open_head(model)
    assert head.tensors.keys() == original.tensors.keys()
    restored = restore(tiny("qwen3_5_moe", with_head=False), out, tmp_path / "again")
    found, wanted = tensors(restored), tensors(model)
    changed = differing(found, wanted)
    assert changed and all("norm" in name for name in changed)
    for name in changed:
        assert (found[name].float() - wanted[name].float()).abs().max() <= 2**-8


def test_a_drafter_of_glm_holds_both_tables_and_comes_back(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("glm4_moe_lite")
    out = export(model, "mlx", tmp_path / "mlx")
    made = load_file(out / "model.safetensors")
    heads, rank, nope, values = 4, 512, 64, 64
    assert made["model.mtp_block.self_attn.embed_q.weight"].shape == (heads, rank, nope)
    assert made["model.mtp_block.self_attn.unembed_out.weight"].shape == (heads, values, rank)
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= made.keys()
    assert made["model.mtp_block.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    restored = restore(tiny("glm4_moe_lite", with_head=False), out, tmp_path / "again")
    assert differing(tensors(restored), tensors(model)) == set()


def test_a_drafter_of_glm_5_leaves_copies_of_tables_out(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("glm_moe_dsa")
    out = export(model, "mlx", tmp_path / "mlx")
    made = load_file(out / "model.safetensors")
    assert all(name.startswith("mtp.") for name in made)
    assert not any("embed_tokens" in name or "shared_head.head" in name for name in made)
    assert "mtp.mlp.switch_mlp.up_proj.weight" in made
    restored = restore(tiny("glm_moe_dsa", with_head=False), out, tmp_path / "again")
    assert differing(tensors(restored), tensors(model)) == set()


def test_families_without_a_drafter_are_refused(tiny: Tiny) -> None:
    with pytest.raises(UnsupportedFamily, match="mimo: no drafter folder of MLX"):
        plan_export(open_head(tiny("mimo")), "mlx")


def test_a_drafter_whose_record_names_another_family_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    out = export(tiny("qwen3_5"), "mlx", tmp_path / "mlx")
    record = json.loads((out / "headstart.json").read_text())
    (out / "headstart.json").write_text(json.dumps({**record, "family": "mimo"}))
    with pytest.raises(BadConfig, match=r"headstart\.json: family is 'mimo'; MLX has drafters of"):
        open_head(out)


def test_numbers_of_modules_have_a_length(tiny: Tiny, tmp_path: Path) -> None:
    out = export(tiny("qwen3_5"), "mlx", tmp_path / "mlx")
    made = load_file(out / "model.safetensors")
    odd = {f"layers.{'1' * 5000}.x.weight": torch.ones(2)}
    save_file({**made, **odd}, out / "model.safetensors")
    with pytest.raises(UnexpectedTensor, match="which is not part of a qwen3_5 head"):
        open_head(out)


def mlx_model(tiny: Tiny, out: Path, prefix: str, *, is_raw: bool = False) -> Path:
    """A folder as MLX converts it, with a head that was kept."""
    bare = tiny("qwen3_5_moe", with_head=False)
    drafter = load_file(export(tiny("qwen3_5_moe"), "mlx", out / "drafter") / "model.safetensors")
    if is_raw:
        drafter = {n: v - 1 if n.endswith("norm.weight") or "_norm_" in n else v
                   for n, v in drafter.items()}  # fmt: skip
    out = out / "model"
    out.mkdir()
    (out / "config.json").write_bytes((bare / "config.json").read_bytes())
    save_file(tensors(bare), out / "model.safetensors", metadata={"format": "mlx"})
    head = {prefix + name: value.contiguous() for name, value in drafter.items()}
    save_file(head, out / "model-mtp.safetensors", metadata={"format": "mlx"})
    return out


@pytest.mark.parametrize("prefix", ["mtp.", "language_model.mtp.", "model.mtp."])
@pytest.mark.parametrize("is_raw", [False, True], ids=["gamma", "raw"])
def test_a_head_inside_a_model_of_mlx_is_read(
    prefix: str, is_raw: bool, tiny: Tiny, tmp_path: Path
) -> None:
    folder = mlx_model(tiny, tmp_path, prefix, is_raw=is_raw)
    head, original = open_head(folder), open_head(tiny("qwen3_5_moe"))
    assert head.tensors.keys() == original.tensors.keys()
    name = "modules.0.out_norm.weight"
    found, wanted = load(head.tensors[name]), load(original.tensors[name])
    assert (found.float() - wanted.float()).abs().max() <= 2**-8
    up = "modules.0.block.mlp.experts.3.up_proj.weight"
    assert torch.equal(load(head.tensors[up]), load(original.tensors[up]))
    assert ("as published" in head.changes[0]) is is_raw


def test_a_model_of_mlx_without_a_head_says_how_to_get_it(tiny: Tiny, tmp_path: Path) -> None:
    folder = mlx_model(tiny, tmp_path, "mtp.")
    (folder / "model-mtp.safetensors").unlink()
    with pytest.raises(HeadNotFound, match=r"converting to MLX drops it.*headstart restore"):
        open_head(folder)


@pytest.fixture(scope="module")
def saved(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What transformers saves of a head with two modules; the model has its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_layers import MtpModel

    config = AutoConfig.from_pretrained(tiny("glm4_moe"))
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    head = MtpModel(base, 2).to(torch.bfloat16)
    for parameter in head.parameters():  # transformers leaves those of experts as memory was
        torch.nn.init.normal_(parameter, std=0.05)
    out = tmp_path_factory.mktemp("mtp") / "mtp"
    head.save_pretrained(out)
    torch.save(head.state_dict(), out.parent / "state.pt")
    return out


def in_memory(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(folder.parent / "state.pt")
    return found


OURS = {"enorm": "embed_norm", "hnorm": "hidden_norm", "eh_proj": "fuse", "post_norm": "out_norm"}


def test_what_transformers_saves_is_read_module_by_module(saved: Path) -> None:
    head = open_head(saved)
    assert (head.family.name, head.num_modules) == ("glm4_moe", 2)
    assert any(".)" in name for name in head.origin.tensors)  # as release 5.22 writes it
    checked = 0
    for name, value in in_memory(saved).items():
        found = re.fullmatch(r"layers\.(\d)\.(\w+)\.(.+)", name)
        if found is None:
            continue
        part = "block" if found[2] == "mtp_block" else OURS[found[2]]
        ours = f"modules.{found[1]}.{part}.{found[3]}"
        assert torch.equal(load(head.tensors[ours]), value), name
        checked += 1
    assert checked == len(head.tensors)


def test_names_as_in_memory_are_read_too(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((saved / "config.json").read_bytes())
    save_file({n: v.clone() for n, v in in_memory(saved).items()}, tmp_path / "model.safetensors")
    assert open_head(tmp_path).tensors.keys() == open_head(saved).tensors.keys()


def test_strangers_in_such_a_folder_are_refused(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((saved / "config.json").read_bytes())
    made = load_file(saved / "model.safetensors")
    save_file({**made, "layers.0.odd.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UnexpectedTensor, match=r"layers\.0\.odd\.weight"):
        open_head(tmp_path)


def test_such_folders_are_not_written(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="no format is called 'mtp_folder'"):
        plan_export(open_head(tiny("glm4_moe")), "mtp_folder")
