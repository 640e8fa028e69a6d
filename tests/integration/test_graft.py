"""A fresh head on a model without one: whole, made from the trunk, and the trunk untouched."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.head_edits import (
    WITH_HEAD,
    Tensors,
    config,
    differing,
    edited,
    graft,
    head_names,
    restore,
    tensors,
)
from support.long_runs import one_of_each
from support.tiny_fixture import Tiny

from headstart.checkpoint.config import Config
from headstart.checkpoint.reader import Checkpoint
from headstart.errors import BadConfig, CheckpointError, UnexpectedTensor, UnsupportedFamily
from headstart.families.registry import family
from headstart.heads.graft import plan_graft
from headstart.heads.inspection import inspect

# variant -> the last trunk layer of the kind that the head's block is
COPIED_LAYER = {
    "deepseek_v3": "model.layers.2.",
    "deepseek_v32": "model.layers.2.",
    "deepseek_v4": "layers.2.",
    "glm4_moe": "model.layers.2.",
    "glm4_moe_lite": "model.layers.2.",
    "glm_moe_dsa": "model.layers.2.",
    "qwen3_next": "model.layers.3.",
    "qwen3_5": "model.language_model.layers.3.",
    "qwen3_5_text": "model.language_model.layers.3.",
    "qwen3_5_moe": "model.language_model.layers.3.",
    "qwen3_5_moe_text": "model.language_model.layers.3.",
    "qwen3": "model.layers.2.",
    "qwen3_moe": "model.layers.1.",  # here, too: the two others have experts
    "mimo": "model.layers.2.",
    "ernie4_5_moe": "model.layers.0.",  # the last dense layer of a MoE trunk
    "step3p5": "model.layers.0.",
}
TRUNKS = [*WITH_HEAD, "llama", "qwen2"]
SUMMED = ("deepseek_v4", "qwen4_exp")  # two projections whose results are added
WITHOUT_OUT_NORM = ("ernie4_5_moe", "qwen4_exp")


@pytest.fixture(scope="module")
def grafted(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`grafted("mimo")`: the trunk of that variant with a fresh head, made once."""
    folder = tmp_path_factory.mktemp("grafted")

    def get(variant: str) -> Path:
        out = folder / variant
        return out if out.exists() else graft(tiny(variant, with_head=False), out)

    return get


@pytest.mark.parametrize("variant", TRUNKS)
def test_a_grafted_head_is_whole(grafted: Any, variant: str) -> None:
    report = inspect(Checkpoint.open(grafted(variant)))
    without_count = variant in ("qwen3_next", "mimo_v2")
    assert report.head.state == ("undeclared" if without_count else "complete")
    assert report.head.missing == ()
    shapes = [w for w in report.warnings if "shape" in w or "not known" in w or "has mean" in w]
    assert shapes == []


@pytest.mark.parametrize("variant", TRUNKS)
def test_grafting_leaves_the_trunk_as_it_is(tiny: Tiny, grafted: Any, variant: str) -> None:
    before = tensors(tiny(variant, with_head=False))
    after = tensors(grafted(variant))
    assert differing(before, {name: after[name] for name in before}) == set()


@pytest.mark.parametrize("variant", COPIED_LAYER)
def test_the_block_starts_as_the_last_trunk_layer_of_its_kind(grafted: Any, variant: str) -> None:
    model = grafted(variant)
    stored = tensors(model)
    block = {o: n for o, n in head_names(model).items() if ".block." in o}
    assert block
    for ours, name in block.items():
        suffix = ours.split(".block.", 1)[1]
        assert torch.equal(stored[name], stored[COPIED_LAYER[variant] + suffix]), name


def test_a_dense_block_on_experts_alone_attends_as_the_last_layer_and_adds_no_mlp(
    tiny: Tiny, tmp_path: Path
) -> None:
    model = graft(tiny("qwen3_moe", with_head=False, mlp_only_layers=[]), tmp_path / "model")
    stored = tensors(model)
    for name in ("self_attn.q_proj", "self_attn.k_norm", "post_attention_layernorm"):
        copied = stored[f"model.layers.2.{name}.weight"]
        assert torch.equal(stored[f"mtp.layers.0.{name}.weight"], copied)
    assert not stored["mtp.layers.0.mlp.down_proj.weight"].any()
    for name in ("gate", "up"):
        weight = stored[f"mtp.layers.0.mlp.{name}_proj.weight"]
        assert weight.shape == (256, 256) and 0.015 < weight.float().std() < 0.025
    written = config(model)
    assert (written["model_type"], written["mtp_num_hidden_layers"]) == ("qwen3_moe", 1)
    assert inspect(Checkpoint.open(model)).head.state == "complete"


def test_sub_layers_start_as_trunk_layers_of_their_kind(grafted: Any) -> None:
    stored = tensors(grafted("nemotron_h"))  # trunk pattern: mamba, attention, moe, mlp
    assert torch.equal(stored["mtp.layers.0.mixer.q_proj.weight"],
                       stored["backbone.layers.1.mixer.q_proj.weight"])  # fmt: skip
    assert torch.equal(stored["mtp.layers.0.norm.weight"], stored["backbone.layers.1.norm.weight"])
    assert torch.equal(stored["mtp.layers.1.norm.weight"], stored["backbone.layers.2.norm.weight"])
    assert torch.equal(stored["mtp.layers.1.mixer.experts.3.up_proj.weight"],
                       stored["backbone.layers.2.mixer.experts.3.up_proj.weight"])  # fmt: skip


@pytest.mark.parametrize("variant", [v for v in TRUNKS if v not in SUMMED])
def test_the_fusion_starts_as_the_mean_of_both_inputs(grafted: Any, variant: str) -> None:
    model = grafted(variant)
    stored = tensors(model)
    fuse = stored[head_names(model)["modules.0.fuse.weight"]].float()
    half = torch.eye(fuse.shape[0]) * 0.5
    assert torch.equal(fuse, torch.cat([half, half], dim=1))


@pytest.mark.parametrize("variant", TRUNKS)
def test_head_norms_start_as_identities(grafted: Any, variant: str) -> None:
    model = grafted(variant)
    stored, names = tensors(model), head_names(model)
    owner = inspect(Checkpoint.open(model)).family
    assert owner is not None
    is_centred = owner.has_centred_norms(Checkpoint.open(model).config.fields)
    for role in ("embed_norm", "hidden_norm")[: 2 if owner.layout.normalises_hidden else 1]:
        weight = stored[names[f"modules.0.{role}.weight"]].float()
        assert torch.equal(weight + float(is_centred), torch.ones_like(weight))


def test_gates_of_head_norms_start_as_identities(grafted: Any) -> None:
    model = grafted("gigachat3_5")
    stored, names = tensors(model), head_names(model)
    gates = [n for ours, n in names.items() if ".embed_norm.gate_" in ours]
    assert len(gates) == 4 and not any(stored[name].any() for name in gates)


def test_streams_are_joined_as_the_trunk_joins_them(grafted: Any) -> None:
    for variant, theirs in (
        ("deepseek_v4", "hc_head_"),
        ("qwen4_exp", "model.language_model.hyper_connection_mixer."),
    ):
        model = grafted(variant)
        stored, names = tensors(model), head_names(model)
        joins = {
            ours: name for ours, name in names.items() if ours.startswith("modules.0.hc_head.")
        }
        assert len(joins) == 3
        for ours, name in joins.items():
            assert torch.equal(
                stored[name], stored[theirs + ours.removeprefix("modules.0.hc_head.")]
            )


@pytest.mark.parametrize("variant", [v for v in TRUNKS if v not in WITHOUT_OUT_NORM])
def test_the_out_norm_starts_as_the_trunks_final_norm(grafted: Any, variant: str) -> None:
    model = grafted(variant)
    stored, names = tensors(model), head_names(model)
    trunk = family(inspect(Checkpoint.open(model)).family.name).trunk
    final = next(
        stored[p + trunk.final_norm] for p in trunk.prefixes if p + trunk.final_norm in stored
    )
    assert torch.equal(stored[names["modules.0.out_norm.weight"]], final)


@pytest.mark.parametrize("variant", ["llama", "qwen2"])
def test_llama_and_qwen2_become_the_mimo_layout(tiny: Tiny, grafted: Any, variant: str) -> None:
    model = grafted(variant)
    written, before = config(model), config(tiny(variant))
    assert written["model_type"] == "mimo"
    assert written["architectures"] == ["MiMoForCausalLM"]
    assert written["num_nextn_predict_layers"] == 1
    assert written["attention_bias"] is True
    assert written["auto_map"] == {"AutoConfig": "configuration_mimo.MiMoConfig"}
    for field in ("hidden_size", "num_hidden_layers", "rope_theta", "rms_norm_eps", "head_dim"):
        assert written[field] == before[field]
    assert "class MiMoConfig" in (model / "configuration_mimo.py").read_text()
    assert (model / "tokenizer.json").read_bytes() == (
        tiny(variant) / "tokenizer.json"
    ).read_bytes()


def test_a_llama_trunk_gets_zero_biases_and_nothing_else(tiny: Tiny, grafted: Any) -> None:
    model = grafted("llama")
    stored = tensors(model)
    added = set(stored) - set(tensors(tiny("llama"))) - set(head_names(model).values())
    expected = {
        f"model.layers.{i}.self_attn.{p}_proj.bias" for i in range(3) for p in ("q", "k", "v")
    }
    assert added == expected
    assert all(not stored[name].any() for name in added)


def test_a_qwen2_trunk_keeps_its_biases(tiny: Tiny, grafted: Any) -> None:
    before, after = tensors(tiny("qwen2")), tensors(grafted("qwen2"))
    name = "model.layers.1.self_attn.k_proj.bias"
    assert before[name].any()
    assert torch.equal(before[name], after[name])


def _without_mtp(stored: Tensors) -> Tensors:
    return {name: value for name, value in stored.items() if "mtp_layers" not in name}


@pytest.mark.parametrize("variant", ["llama", "qwen2"])
def test_the_grafted_trunk_computes_the_same_logits(
    tiny: Tiny, tmp_path: Path, variant: str
) -> None:
    """MiMo's trunk is Qwen2's, so transformers' Qwen2 runs what was written for MiMo."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    source = tiny(variant, dtype="F32")
    model = graft(source, tmp_path / "model")
    kinds = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}
    config_class, model_class = kinds[variant]
    before = model_class(config_class(**_plain(config(source)))).eval()
    before.load_state_dict(tensors(source))
    after = Qwen2ForCausalLM(Qwen2Config(**_plain(config(model)))).eval()
    after.load_state_dict(_without_mtp(tensors(model)))  # strict: nothing missing, nothing left
    ids = torch.arange(2, 42).reshape(2, 20)
    with torch.no_grad():
        expected, found = before(ids).logits, after(ids).logits
    assert expected.std() > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def _plain(document: dict[str, Any]) -> dict[str, Any]:
    skipped = ("model_type", "architectures", "auto_map", "torch_dtype", "transformers_version")
    return {key: value for key, value in document.items() if key not in skipped}


MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}


def test_a_mistral_trunk_becomes_the_mimo_layout_with_the_same_logits(
    tiny: Tiny, tmp_path: Path
) -> None:
    from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

    source = tiny("llama", dtype="F32", **MISTRAL, sliding_window=None)
    model = graft(source, tmp_path / "model")
    assert config(model)["model_type"] == "mimo"
    before = MistralForCausalLM(MistralConfig(**_plain(config(source)))).eval()
    before.load_state_dict(tensors(source))
    after = Qwen2ForCausalLM(Qwen2Config(**_plain(config(model)))).eval()
    after.load_state_dict(_without_mtp(tensors(model)))
    ids = torch.arange(2, 42).reshape(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(after(ids).logits, before(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("said", [{"sliding_window": 32}, {"max_position_embeddings": 8192}])
def test_a_mistral_that_slides_is_refused(tiny: Tiny, said: dict[str, Any]) -> None:
    """Its class slides over 4096 tokens where the config is silent."""
    document = Config({**config(tiny("llama")), **MISTRAL, **said})
    with pytest.raises(UnsupportedFamily, match=r"sliding_window.*7B v0\.2"):
        plan_graft(replace(Checkpoint.open(tiny("llama")), config=document))


@pytest.mark.parametrize("variant", one_of_each(3, WITH_HEAD))
def test_a_model_that_has_a_head_is_refused(tiny: Tiny, tmp_path: Path, variant: str) -> None:
    with pytest.raises(CheckpointError, match="headstart stitch"):
        graft(tiny(variant), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("field", ["mlp_bias", "attention_bias"])
def test_a_llama_with_biases_is_refused(tiny: Tiny, tmp_path: Path, field: str) -> None:
    def change(document: dict[str, Any]) -> None:
        document[field] = True

    model = edited(tiny("llama"), tmp_path / "model", change_config=change)
    with pytest.raises(UnsupportedFamily, match="has no place for"):
        graft(model, tmp_path / "out")


def test_a_trunk_with_unknown_tensors_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    def change(contents: Tensors) -> None:
        contents["model.layers.0.self_attn.sinks"] = torch.zeros(4)

    model = edited(tiny("llama"), tmp_path / "model", change=change)
    with pytest.raises(UnexpectedTensor, match=r"self_attn\.sinks"):
        graft(model, tmp_path / "out")


SIZES = (
    "hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size",
)  # fmt: skip


@pytest.mark.parametrize("variant", ["llama", "qwen2"])
@pytest.mark.parametrize("value", [None, "64", 0, -1, 2.5, True, [64], 10**12], ids=str)
@pytest.mark.parametrize("field", SIZES)
def test_a_config_whose_sizes_do_not_hold_is_refused(
    tiny: Tiny, tmp_path: Path, variant: str, field: str, value: Any
) -> None:
    changed = Config({**config(tiny(variant)), field: value})
    with pytest.raises(BadConfig, match=r"expected a positive integer|asks for"):
        plan_graft(replace(Checkpoint.open(tiny(variant)), config=changed))


@pytest.mark.parametrize("field", SIZES)
def test_a_config_that_lacks_a_size_is_refused(tiny: Tiny, field: str) -> None:
    document = config(tiny("llama"))
    del document[field]
    with pytest.raises(BadConfig, match=f"has no {field}; expected"):
        plan_graft(replace(Checkpoint.open(tiny("llama")), config=Config(document)))


@pytest.mark.parametrize("field", ["head_dim", "num_key_value_heads"])
@pytest.mark.parametrize("value", ["2", 0, 1000])
def test_an_optional_size_must_hold_where_it_is_given(tiny: Tiny, field: str, value: Any) -> None:
    changed = Config({**config(tiny("llama")), field: value})
    with pytest.raises(BadConfig, match=r"expected a positive integer|asks for"):
        plan_graft(replace(Checkpoint.open(tiny("llama")), config=changed))


def test_the_note_does_not_say_how_good_an_untrained_head_is(tiny: Tiny) -> None:
    changes = plan_graft(Checkpoint.open(tiny("llama"))).changes
    assert any("unknown until it is trained" in change for change in changes)


def test_a_head_that_was_lost_can_be_restored_instead(tiny: Tiny, tmp_path: Path) -> None:
    def lose(found: Tensors) -> None:
        for name in head_names(tiny("mimo")).values():
            del found[name]

    lost = edited(tiny("mimo"), tmp_path / "lost", change=lose)
    assert any(
        "headstart restore" in change for change in plan_graft(Checkpoint.open(lost)).changes
    )
    changes = plan_graft(Checkpoint.open(tiny("llama"))).changes
    assert not any("headstart restore" in change for change in changes)


@pytest.mark.parametrize(
    ("model_type", "words"), [("phi9", "phi9"), ("solar_open", "Solar Open ships without a head")]
)
def test_an_unknown_model_is_refused(
    tiny: Tiny, tmp_path: Path, model_type: str, words: str
) -> None:
    def change(document: dict[str, Any]) -> None:
        document.update(model_type=model_type, architectures=["Phi9ForCausalLM"])

    model = edited(tiny("llama"), tmp_path / "model", change_config=change)
    with pytest.raises(UnsupportedFamily, match=words):
        graft(model, tmp_path / "out")


def test_what_a_llama_config_leaves_open_is_written_out(tiny: Tiny, tmp_path: Path) -> None:
    """Old configs have no num_key_value_heads, for which Llama and Qwen2 assume other values."""

    def forget(document: dict[str, Any]) -> None:
        for field in ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps"):
            del document[field]

    source = tiny("llama", num_key_value_heads=4)
    model = graft(edited(source, tmp_path / "old", change_config=forget), tmp_path / "model")
    written = config(model)
    assert written["num_key_value_heads"] == 4
    assert written["max_position_embeddings"] == 2048
    assert written["rms_norm_eps"] == 1e-6
    assert inspect(Checkpoint.open(model)).head.state == "complete"


def test_a_tied_llama_stays_tied_and_its_head_starts_softly(tiny: Tiny, tmp_path: Path) -> None:
    model = graft(tiny("llama", tie_word_embeddings=True), tmp_path / "model")
    assert config(model)["tie_word_embeddings"] is True
    stored = tensors(model)
    soft, final = (stored[f"model.{n}.weight"] for n in ("mtp_layers.0.final_layernorm", "norm"))
    torch.testing.assert_close(soft.float(), final.float() * 0.2, rtol=1e-2, atol=0)
    assert "lm_head.weight" not in tensors(model)
    assert inspect(Checkpoint.open(model)).head.state == "complete"


@pytest.mark.parametrize("variant", ["llama", "deepseek_v3", "qwen3_5_moe"])
def test_a_sharded_model_gets_its_head_in_a_shard_of_its_own(
    tiny: Tiny, tmp_path: Path, variant: str
) -> None:
    source = tiny(variant, with_head=False, shard_bytes=300_000)
    model = graft(source, tmp_path / "model")
    index = json.loads((model / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors(model))
    head_files = {index["weight_map"][name] for name in head_names(model).values()}
    assert head_files == {"model-mtp.safetensors"}
    for shard in source.glob("*.safetensors"):
        assert (model / shard.name).read_bytes() == shard.read_bytes()


def test_a_trained_head_replaces_a_grafted_one(tiny: Tiny, grafted: Any, tmp_path: Path) -> None:
    bare = restore(tiny("mimo", with_head=False), grafted("mimo"), tmp_path / "restored")
    assert differing(tensors(grafted("mimo")), tensors(bare)) == set()


def test_the_experts_of_a_fused_trunk_are_taken_apart_for_the_head(
    tiny: Tiny, tmp_path: Path
) -> None:
    """Qwen3.5's trunks are fused while its heads are stored expert by expert."""
    prefix = "model.language_model.layers.3.mlp.experts."

    def fuse(contents: Tensors) -> None:
        parts = {
            (e, p): contents.pop(f"{prefix}{e}.{p}_proj.weight")
            for e in range(4)
            for p in ("gate", "up", "down")
        }
        rows = [torch.cat([parts[e, "gate"], parts[e, "up"]]) for e in range(4)]
        contents[f"{prefix}gate_up_proj"] = torch.stack(rows)
        contents[f"{prefix}down_proj"] = torch.stack([parts[e, "down"] for e in range(4)])

    source = tiny("qwen3_5_moe", with_head=False)
    model = graft(edited(source, tmp_path / "fused", change=fuse), tmp_path / "model")
    stored, before = tensors(model), tensors(source)
    name = "mtp.layers.0.mlp.experts.2.up_proj.weight"
    assert torch.equal(stored[name], before[f"{prefix}2.up_proj.weight"])
