"""A head goes out, through other formats, and back, and every byte is where it was."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.head_edits import (
    WITH_HEAD,
    config,
    convert,
    differing,
    edited,
    export,
    head_names,
    restore,
    stitch,
    tensors,
    text_part,
    with_dense_head,
    written,
)
from support.long_runs import IS_LONG, one_of_each
from support.tiny_fixture import Tiny

from headstart.checkpoint.config import COUNT_FIELDS
from headstart.checkpoint.reader import Checkpoint
from headstart.errors import (
    BadConfig,
    CheckpointError,
    ConfigError,
    MissingTensor,
    ShapeMismatch,
    UnexpectedTensor,
    UnsupportedFamily,
)
from headstart.families.base import HeadLayout
from headstart.heads.detection import find_head
from headstart.heads.export import plan_export
from headstart.heads.formats import FORMATS, format_of, open_head
from headstart.heads.formats.headstart import contract
from headstart.heads.stitch import plan_stitch

# variants that a format has no place for, with a word of the reason
REFUSED = {
    "xllm": {
        "glm4_moe_lite": "no MLA",
        "qwen3_next": "no loader",
        "qwen3": "no loader",
        "mimo_v2": "MiMo-7B",
        "ernie4_5_moe": "no loader",
        "nemotron_h": "no loader",
        "step3p5": "no loader",
        "mellum": "no loader",
        "qwen3_moe": "no loader",
        "hy_v4": "no loader",
        "qwen4_exp": "no loader",
        "motif": "no loader",
        "gigachat3_5": "no loader",
        "openpangu_v2": "no loader",
        "bailing_moe_v2": "no loader",
        "bailing_moe_v3": "no loader",
        "exaone_moe": "no loader",
        "exaone4_5": "no loader",
    },
    "sglang": dict.fromkeys(
        ("qwen3", "qwen3_moe", "mellum", "motif", "openpangu_v2", "exaone4_5"), "does not serve"
    ),
    "speculators": {
        "deepseek_v4": "one fusion matrix, and these heads add two",
        "mimo_v2": "one module, and there are 3",
        "ernie4_5_moe": "wants an out norm, and these heads",
        "nemotron_h": "one decoder layer, and these heads have several",
        "step3p5": "no place for an LM head",
        "qwen4_exp": "one fusion matrix, and these heads add two",
        "motif": "wants a norm of the hidden state",
        "gigachat3_5": "there are 2",
        "openpangu_v2": "there are 3",
    },
    "headstart": {},
}
# name -> variant and options: every family, then layouts that some checkpoints have
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{variant: (variant, {}) for variant in WITH_HEAD},
    "qwen3_5_moe-fused": ("qwen3_5_moe", {"fused_experts": True}),
    "qwen3_next-fused": ("qwen3_next", {"fused_experts": True}),
    "deepseek_v3-fused": ("deepseek_v3", {"fused_experts": True}),
    "qwen3_5_text-model.mtp": ("qwen3_5_text", {"root": "model."}),
    "qwen3_5_moe_text-model.mtp": ("qwen3_5_moe_text", {"root": "model."}),
    "deepseek_v3-sharded": ("deepseek_v3", {"shard_bytes": 400_000}),
    "qwen3_5_moe-sharded": ("qwen3_5_moe", {"shard_bytes": 400_000}),
    "mimo_v2-sharded": ("mimo_v2", {"shard_bytes": 300_000}),
    "qwen3_5_text-tied": ("qwen3_5_text", {"tie_word_embeddings": True}),
    "ernie4_5_moe-tied": ("ernie4_5_moe", {"tie_word_embeddings": True}),
    "mimo-tied": ("mimo", {"tie_word_embeddings": True}),
}


def allowed(name: str) -> list[str]:
    return [f for f in FORMATS if MODELS[name][0] not in REFUSED[f]]


def in_turn(number: int, forms: list[str]) -> list[str]:
    """One of them, another for the next number; all in long runs."""
    return forms if IS_LONG else [forms[number % len(forms)]]


# Formats take turns, unless runs are long: that every family's head fits into every format is
# shown by the one that goes through all of them.
ROUND_TRIPS = [
    pytest.param(name, form, id=f"{name}-{form}")
    for number, name in enumerate(MODELS)
    for form in in_turn(number, allowed(name))
]
# Other formats than above, and for every third model.
TURNS = [
    pytest.param(name, form, id=f"{name}-{form}")
    for number, name in enumerate(one_of_each(3, MODELS))
    for form in in_turn(number, allowed(name))
]
EVERY_FORMAT = [name for name in MODELS if name in WITH_HEAD] + one_of_each(
    2, [name for name in MODELS if name not in WITH_HEAD]
)
# One way there and the other back: with one other format, in long runs with each.
PAIRS = [
    pytest.param(name, first, second, id=f"{name}-{first}-{second}")
    for number, name in enumerate(MODELS)
    if len(allowed(name)) > 1
    for first in in_turn(number, allowed(name))
    for second in in_turn(number // 2, [form for form in allowed(name) if form != first])
]


def make(tiny: Tiny, name: str, **more: Any) -> Path:
    variant, options = MODELS[name]
    return tiny(variant, **options, **more)


Exported = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def exported(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """`exported(name, form)`: the head of a model in a format, made once."""
    folder = tmp_path_factory.mktemp("exports")

    def get(name: str, form: str) -> Path:
        out = folder / f"{name}-{form}"
        return out if out.exists() else export(make(tiny, name), form, out)

    return get


def readable(model: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model with its head under names that engines read, as `stitch` writes."""
    found = find_head(Checkpoint.open(model))
    keys, naming = found.family.keys, found.family.keys.readable(found.naming)
    renamed = {name: keys.to_published(ours, naming) for ours, name in found.tensors.items()}
    return {renamed.get(name, name): tensor for name, tensor in tensors(model).items()}


def undeclared(tiny: Tiny, name: str) -> Path:
    """The trunk alone, whose config does not declare a head."""
    bare = make(tiny, name, with_head=False)
    out = bare.with_name(f"{bare.name}-undeclared")
    if not out.exists() and not (bare / "model.safetensors.index.json").exists():
        edited(bare, out, change_config=forget_count)
    return out if out.exists() else bare


def forget_count(document: dict[str, Any]) -> None:
    for field in COUNT_FIELDS:
        text_part(document).pop(field, None)


@pytest.mark.parametrize(("name", "form"), ROUND_TRIPS)
def test_stitch_gives_a_bare_trunk_its_exported_head_back(
    tiny: Tiny, exported: Exported, tmp_path: Path, name: str, form: str
) -> None:
    model = make(tiny, name)
    result = stitch(exported(name, form), undeclared(tiny, name), tmp_path / "result")
    assert differing(readable(model), tensors(result)) == set()
    assert config(result) == config(model)


@pytest.mark.parametrize(("name", "form"), TURNS)
def test_stitch_of_an_export_into_the_same_model_changes_nothing(
    tiny: Tiny, exported: Exported, tmp_path: Path, name: str, form: str
) -> None:
    model = make(tiny, name)
    result = stitch(exported(name, form), model, tmp_path / "result")
    assert differing(readable(model), tensors(result)) == set()
    assert config(result) == config(model)


@pytest.mark.parametrize(("name", "form"), ROUND_TRIPS)
def test_an_export_is_recognised_by_its_files(
    tiny: Tiny, exported: Exported, name: str, form: str
) -> None:
    head = open_head(exported(name, form))
    assert format_of(head.origin) == form
    assert head.family.name == open_head(make(tiny, name)).family.name


@pytest.mark.parametrize(("name", "first", "second"), PAIRS)
def test_converting_there_and_back_gives_the_same_files(
    tiny: Tiny, exported: Exported, tmp_path: Path, name: str, first: str, second: str
) -> None:
    model = make(tiny, name)
    start = exported(name, first)
    there = convert(start, second, tmp_path / "there", model)
    back = convert(there, first, tmp_path / "back", model)
    carried = {name for name in tensors(back) if name.startswith("trunk.")}  # by Qwen's xLLM export
    assert differing(tensors(start), tensors(back)) == carried
    if first != "speculators":  # which names the folder it was made from
        assert config(start) == config(back)


@pytest.mark.parametrize("name", one_of_each(2, [n for n in EVERY_FORMAT if len(allowed(n)) > 1]))
def test_a_head_that_went_through_every_format_still_fits(
    tiny: Tiny, tmp_path: Path, name: str
) -> None:
    model = make(tiny, name)
    head = export(model, "headstart", tmp_path / "head")
    for number, form in enumerate([*allowed(name), *reversed(allowed(name))]):
        needs_trunk = form == "xllm" and ("qwen" in name or name == "glm5_next")
        head = convert(head, form, tmp_path / str(number), model if needs_trunk else None)
    result = stitch(head, make(tiny, name, with_head=False), tmp_path / "result")
    assert differing(readable(model), tensors(result)) == set()


@pytest.mark.parametrize("name", one_of_each(3, MODELS, first=2))
def test_restore_gives_a_trunk_the_head_of_its_original(
    tiny: Tiny, tmp_path: Path, name: str
) -> None:
    model = make(tiny, name)
    result = restore(make(tiny, name, with_head=False), model, tmp_path / "result")
    assert differing(readable(model), tensors(result)) == set()
    assert config(result) == config(model)


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_5_moe", "nemotron_h", "mimo_v2", "step3p5"])
def test_restore_completes_a_partial_head(tiny: Tiny, tmp_path: Path, name: str) -> None:
    model = make(tiny, name)
    lost = list(head_names(model).values())[3::5]
    broken = edited(model, tmp_path / "broken", change=lambda t: [t.pop(n) for n in lost])
    result = restore(broken, model, tmp_path / "result")
    assert differing(tensors(model), tensors(result)) == set()


def test_restore_refuses_a_model_whose_head_is_whole(tiny: Tiny, tmp_path: Path) -> None:
    model, other = tiny("mimo"), tiny("mimo", seed=1)
    with pytest.raises(CheckpointError, match=f"nothing to restore.* stitch {other} {model} "):
        restore(model, other, tmp_path / "result")


@pytest.mark.parametrize("name", one_of_each(3, MODELS, first=1))
def test_another_head_changes_the_head_and_nothing_else(
    tiny: Tiny, tmp_path: Path, name: str
) -> None:
    model, other = make(tiny, name), make(tiny, name, seed=1)
    result = stitch(other, model, tmp_path / "result")
    names = head_names(result)
    family = open_head(model).family
    copies = {p for ours, p in names.items() if ours.split(".")[2] in family.copies}
    before, after, theirs = readable(model), tensors(result), readable(other)
    changed = differing(before, after)
    assert changed == differing(before, theirs) & set(names.values()) - copies
    assert len(changed) > 0.9 * len(names) - len(copies)
    assert differing({n: theirs[n] for n in changed}, {n: after[n] for n in changed}) == set()


@pytest.mark.parametrize(
    ("form", "variant"),
    [pytest.param(f, v, id=f"{f}-{v}") for f in REFUSED for v in REFUSED[f]],
)
def test_a_format_without_a_place_for_the_head_says_why(
    tiny: Tiny, tmp_path: Path, form: str, variant: str
) -> None:
    with pytest.raises(UnsupportedFamily, match=REFUSED[form][variant]) as error:
        export(tiny(variant), form, tmp_path / "head")
    assert variant.removesuffix("_v2" if variant.startswith("bailing") else "") in str(error.value)
    assert "headstart" in str(error.value), "what to use instead is not said"
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize("form", ["xllm", "sglang", "speculators", "headstart"])
def test_a_head_of_another_family_is_refused(tiny: Tiny, tmp_path: Path, form: str) -> None:
    head = export(tiny("deepseek_v3"), form, tmp_path / "head")
    with pytest.raises(UnsupportedFamily, match="is a deepseek_v3 head"):
        stitch(head, tiny("glm_moe_dsa"), tmp_path / "result")
    assert not (tmp_path / "result").exists()


@pytest.mark.parametrize("variant", one_of_each(3, WITH_HEAD))
def test_a_head_of_another_width_is_refused(tiny: Tiny, tmp_path: Path, variant: str) -> None:
    other = tiny(variant, hidden_size=128, vocab_size=64)
    with pytest.raises(ShapeMismatch, match="another model size"):
        stitch(other, tiny(variant), tmp_path / "result")


@pytest.mark.parametrize("variant", ["glm4_moe", "qwen3_5_moe", "nemotron_h"])
def test_a_head_with_another_number_of_experts_is_refused(
    tiny: Tiny, tmp_path: Path, variant: str
) -> None:
    field = "num_experts" if "qwen" in variant else "n_routed_experts"
    with pytest.raises(CheckpointError, match=r"another model size|experts"):
        stitch(tiny(variant, **{field: 6}), tiny(variant), tmp_path / "result")
    with pytest.raises(CheckpointError, match=r"another model size|experts"):
        stitch(tiny(variant), tiny(variant, **{field: 6}), tmp_path / "other")


@pytest.mark.parametrize("variant", ["qwen3_5_moe", "qwen3_next"])
def test_stitch_keeps_the_expert_layout_of_the_model(
    tiny: Tiny, tmp_path: Path, variant: str
) -> None:
    apart, fused = tiny(variant), tiny(variant, fused_experts=True)
    into_fused = stitch(apart, fused, tmp_path / "into_fused")
    assert set(tensors(into_fused)) == set(tensors(fused))
    back = stitch(into_fused, apart, tmp_path / "back")
    assert differing(tensors(apart), tensors(back)) == set()


def test_fused_experts_hold_gate_rows_before_up_rows(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("qwen3_5_moe")
    head = tensors(export(model, "speculators", tmp_path / "head"))
    fused = head["mtp_layers.0.mlp.experts.gate_up_proj"]
    stored = tensors(model)
    for expert in range(4):
        at = f"mtp.layers.0.mlp.experts.{expert}."
        both = [stored[f"{at}gate_proj.weight"], stored[f"{at}up_proj.weight"]]
        assert torch.equal(fused[expert], torch.cat(both))


@pytest.mark.parametrize("variant", ["qwen3_5_text", "qwen3_next"])
def test_names_that_engines_skip_are_never_written(
    tiny: Tiny, tmp_path: Path, variant: str
) -> None:
    """vLLM and SGLang take `mtp.*` and pass over `model.mtp.*`, which some trainers save."""
    model, bare = tiny(variant, root="model."), tiny(variant, with_head=False)
    assert all(name.startswith("model.mtp.") for name in head_names(model).values())
    head = export(model, "sglang", tmp_path / "head")
    assert all(name.startswith("mtp.") for name in tensors(head))
    assert any("mtp., which SGLang reads" in note for note in config_changes(head))
    for number, (source, target) in enumerate([(head, bare), (model, model), (head, model)]):
        result = stitch(source, target, tmp_path / str(number))
        assert all(name.startswith("mtp.") for name in head_names(result).values())
        assert not any(name.startswith("model.mtp.") for name in tensors(result))
    restored = restore(bare, model, tmp_path / "restored")
    assert all(name.startswith("mtp.") for name in head_names(restored).values())
    assert any("which engines read" in note for note in config_changes(restored))


@pytest.mark.parametrize("variant", ["glm4_moe", "glm5_next", "qwen3_5_text"])
def test_a_plain_head_for_xllm_is_not_said_to_be_quantised(
    variant: str, tiny: Tiny, tmp_path: Path
) -> None:
    """The control of the remark about quantised bytes, which only heads with such get."""
    changes = config_changes(export(tiny(variant), "xllm", tmp_path / "head"))
    assert not any("quantised" in note for note in changes)


def config_changes(folder: Path) -> list[str]:
    changes = json.loads((folder / "headstart.json").read_text())["changes"]
    assert isinstance(changes, list)
    return changes


def test_the_speculators_format_puts_the_embedding_half_first_for_mimo(
    tiny: Tiny, tmp_path: Path
) -> None:
    model = tiny("mimo")
    stored = tensors(model)["model.mtp_layers.0.input_proj.weight"]
    head = tensors(export(model, "speculators", tmp_path / "head"))
    hidden_half, embed_half = stored.chunk(2, dim=1)
    expected = torch.cat([embed_half, hidden_half], dim=1)
    assert torch.equal(head["mtp_layers.0.input_proj.weight"], expected)
    assert not torch.equal(stored, expected)


@pytest.mark.parametrize("variant", ["qwen3_5", "qwen3_5_text", "qwen3_5_moe"])
def test_an_xllm_export_of_qwen_carries_embedding_and_lm_head(
    tiny: Tiny, tmp_path: Path, variant: str
) -> None:
    model = tiny(variant)
    head = tensors(export(model, "xllm", tmp_path / "head"))
    carried = set(head) - set(head_names(model).values())
    embed = "model.language_model.embed_tokens.weight"
    assert carried == {embed, "lm_head.weight"}
    assert differing({n: tensors(model)[n] for n in head}, head) == set()


def test_tables_of_glm5_next_that_are_more_than_a_weight_are_refused(tiny: Tiny) -> None:
    head = open_head(tiny("glm5_next"))
    table = "modules.0.embed_tokens.weight"
    odd = {table.replace("weight", "weight_scale"): head.tensors[table]}
    with pytest.raises(UnexpectedTensor, match=r"no place for modules\.0\.embed_tokens\.weight_"):
        plan_export(replace(head, tensors={**head.tensors, **odd}), "xllm")


@pytest.mark.parametrize("copies", ["with copies", "without copies"])
def test_an_xllm_export_of_glm5_next_is_a_small_model(
    tiny: Tiny, tmp_path: Path, copies: str
) -> None:
    """As xLLM's script names it: the tables are the head's own where it has them."""

    def drop(contents: dict[str, torch.Tensor]) -> None:
        for part in ("embed_tokens", "shared_head.head"):
            del contents[f"model.language_model.layers.3.{part}.weight"]

    model = tiny("glm5_next")
    if copies == "without copies":
        model = edited(model, tmp_path / "model", change=drop)
    folder = export(model, "xllm", tmp_path / "head")
    head, stored, written_config = tensors(folder), tensors(model), config(folder)
    at = "model.language_model."
    for theirs, ours in {
        "model.enorm.weight": f"{at}layers.3.enorm.weight",
        "model.norm.weight": f"{at}layers.3.shared_head.norm.weight",
        "model.layers.0.mlp.gate.weight": f"{at}layers.3.mlp.gate.weight",
        "model.embed_tokens.weight": f"{at}embed_tokens.weight",
        "lm_head.weight": "lm_head.weight",
    }.items():
        assert torch.equal(head[theirs], stored[ours])
    assert len(head) == 39
    assert written_config["model_type"] == "glm5_next_mtp"
    for part in (written_config, written_config["text_config"]):
        assert part["num_hidden_layers"] == 1 and part["mlp_layer_types"] == ["sparse"]
        assert part["layer_types"] == ["deepseek_sparse_attention"]
        assert part["quantization_config"] == "" and part["index_share_for_mtp_iteration"] is False
    back = stitch(folder, model, tmp_path / "back")
    assert differing(stored, tensors(back)) == set()


def test_an_xllm_export_of_a_tied_qwen_carries_the_embedding_only(
    tiny: Tiny, tmp_path: Path
) -> None:
    model = tiny("qwen3_5_text", tie_word_embeddings=True)
    head = tensors(export(model, "xllm", tmp_path / "head"))
    carried = set(head) - set(head_names(model).values())
    assert carried == {"model.language_model.embed_tokens.weight"}


def test_an_xllm_export_of_qwen_asks_for_the_trunk_where_it_is_not_at_hand(
    tiny: Tiny, tmp_path: Path
) -> None:
    head = export(tiny("qwen3_5"), "sglang", tmp_path / "head")
    with pytest.raises(MissingTensor, match="--model"):
        convert(head, "xllm", tmp_path / "xllm")


@pytest.mark.parametrize("form", ["sglang", "speculators"])
def test_copies_that_a_format_leaves_out_are_copied_from_the_trunk_again(
    tiny: Tiny, tmp_path: Path, form: str
) -> None:
    model = tiny("deepseek_v3")
    head = export(model, form, tmp_path / "head")
    assert not [n for n in tensors(head) if "embed_tokens" in n or "shared_head.head" in n]
    full = convert(head, "headstart", tmp_path / "full", model)
    assert (
        differing(tensors(export(model, "headstart", tmp_path / "direct")), tensors(full)) == set()
    )


def test_a_copy_in_the_head_becomes_a_copy_of_the_new_trunk(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("glm4_moe")
    result = tensors(stitch(tiny("glm4_moe", seed=1), model, tmp_path / "result"))
    assert torch.equal(
        result["model.layers.3.embed_tokens.weight"], result["model.embed_tokens.weight"]
    )
    assert torch.equal(result["model.layers.3.shared_head.head.weight"], result["lm_head.weight"])


def test_a_trained_lm_head_is_never_replaced_by_the_trunks(tiny: Tiny, tmp_path: Path) -> None:
    """Step-3.5's modules have LM heads of their own; the trunk's in their place drafts nonsense."""
    other = tiny("step3p5", seed=1)
    result = tensors(stitch(other, tiny("step3p5"), tmp_path / "result"))
    name = "model.layers.4.transformer.shared_head.output.weight"
    assert torch.equal(result[name], tensors(other)[name])
    assert not torch.equal(result[name], result["lm_head.weight"])


@pytest.mark.parametrize("name", ["deepseek_v3-sharded", "qwen3_5_moe-sharded"])
def test_stitch_writes_an_index_that_covers_every_tensor(
    tiny: Tiny, tmp_path: Path, name: str
) -> None:
    result = stitch(make(tiny, name), make(tiny, name, with_head=False), tmp_path / "result")
    index = json.loads((result / "model.safetensors.index.json").read_text())
    stored = tensors(result)
    assert set(index["weight_map"]) == set(stored)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored.values())
    for shard in set(index["weight_map"].values()):
        assert (result / shard).is_file()


def test_a_model_of_one_file_stays_one(tiny: Tiny, tmp_path: Path) -> None:
    result = stitch(tiny("mimo"), tiny("mimo", with_head=False), tmp_path / "result")
    assert [p.name for p in result.glob("*.safetensors")] == ["model.safetensors"]
    assert not (result / "model.safetensors.index.json").exists()


def test_stitching_writes_an_index_over_a_side_file_that_none_listed(
    tiny: Tiny, tmp_path: Path
) -> None:
    model = tiny("deepseek_v3", shard_bytes=400_000)
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    path = broken / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    last = sorted(set(index["weight_map"].values()))[-1]
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if f != last}
    path.write_text(json.dumps(index))
    result = stitch(model, broken, tmp_path / "result")
    mended = json.loads((result / "model.safetensors.index.json").read_text())
    assert set(mended["weight_map"]) == set(tensors(model))


def forgotten(head: Path, out: Path) -> Path:
    """An export as another tool would have written it: without our provenance."""
    shutil.copytree(head, out)
    (out / "headstart.json").unlink()
    return out


OTHER_TOOLS = ("deepseek_v3", "glm_moe_dsa", "qwen3_5", "qwen3_5_moe", "mimo", "qwen3_next")


@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param(name, form, id=f"{name}-{form}")
        for number, name in enumerate(OTHER_TOOLS)
        for turn, form in enumerate(allowed(name))
        if IS_LONG or number % 2 == turn % 2
    ],
)
def test_a_head_that_another_tool_wrote_is_read_as_well(
    tiny: Tiny, exported: Exported, tmp_path: Path, name: str, form: str
) -> None:
    model = make(tiny, name)
    head = forgotten(exported(name, form), tmp_path / "head")
    result = stitch(head, model, tmp_path / "result")
    assert differing(tensors(model), tensors(result)) == set()


def test_a_count_inside_of_an_object_that_is_null_is_written(tiny: Tiny, tmp_path: Path) -> None:
    """Inkling keeps the number of modules in mtp_config."""

    def empty(document: dict[str, Any]) -> None:
        document["mtp_config"] = None
        document.pop("num_nextn_predict_layers", None)

    model = edited(tiny("mimo", with_head=False), tmp_path / "model", change_config=empty)
    head = open_head(tiny("mimo"))
    field = "mtp_config.num_nextn_predict_layers"
    changed = replace(head, family=replace(head.family, count_field=field))
    plan_stitch(changed, Checkpoint.open(model)).write(tmp_path / "out")
    assert config(tmp_path / "out")["mtp_config"] == {"num_nextn_predict_layers": 1}


def set_config(head: Path, out: Path, **changes: Any) -> Path:
    shutil.copytree(head, out)
    (out / "config.json").write_text(json.dumps({**config(head), **changes}))
    return out


def test_a_later_version_of_our_format_is_refused(exported: Exported, tmp_path: Path) -> None:
    head = set_config(exported("mimo", "headstart"), tmp_path / "head", headstart_format=2)
    with pytest.raises(BadConfig, match="headstart_format is 2; this release reads 1"):
        open_head(head)


def test_a_head_made_under_another_contract_is_refused(exported: Exported, tmp_path: Path) -> None:
    layout = {**config(exported("mimo", "headstart"))["layout"], "fuse_order": "embed_first"}
    head = set_config(exported("mimo", "headstart"), tmp_path / "head", layout=layout)
    with pytest.raises(BadConfig, match=r"layout\.fuse_order is 'embed_first'"):
        open_head(head)


@pytest.mark.parametrize("key", sorted(contract(HeadLayout())))
def test_every_part_of_the_contract_is_compared(
    exported: Exported, tmp_path: Path, key: str
) -> None:
    layout = {**config(exported("mimo", "headstart"))["layout"], key: "something else"}
    head = set_config(exported("mimo", "headstart"), tmp_path / "head", layout=layout)
    with pytest.raises(BadConfig, match=rf"layout\.{key} is 'something else'; the family has"):
        open_head(head)


@pytest.mark.parametrize("part", ["norm", "down_proj"])
@pytest.mark.parametrize("form", FORMATS)
def test_an_export_that_lost_a_tensor_is_refused(
    exported: Exported, tmp_path: Path, form: str, part: str
) -> None:
    head = tmp_path / "head"
    shutil.copytree(exported("deepseek_v3", form), head)
    contents = tensors(head)
    del contents[next(name for name in contents if part in name)]
    for file in ("model.safetensors.index.json", "headstart.json"):
        if form != "speculators":  # whose config lists only what is not a default
            (head / file).unlink(missing_ok=True)
    save_file(contents, next(head.glob("*.safetensors")))
    with pytest.raises(MissingTensor, match=rf"lacks modules\.0\..*{part}"):
        open_head(head)


@pytest.mark.parametrize("form", FORMATS)
def test_an_export_with_a_stranger_in_it_is_refused(
    exported: Exported, tmp_path: Path, form: str
) -> None:
    head = tmp_path / "head"
    shutil.copytree(exported("mimo", form), head)
    contents = {**tensors(head), "vision.patch.weight": torch.zeros(2)}
    (head / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(contents, next(head.glob("*.safetensors")))
    with pytest.raises(UnexpectedTensor, match=r"vision\.patch\.weight"):
        open_head(head)


def test_a_head_that_lacks_what_the_model_asks_for_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    head = tiny("glm4_moe", use_qk_norm=False)
    with pytest.raises(MissingTensor, match=r"lacks modules\.0\.block\.self_attn\.q_norm"):
        stitch(head, tiny("glm4_moe"), tmp_path / "result")


@pytest.mark.parametrize("is_fused", [False, True], ids=["apart", "fused"])
def test_experts_of_another_width_are_refused(tiny: Tiny, tmp_path: Path, is_fused: bool) -> None:
    head = tiny("qwen3_5_moe", fused_experts=is_fused, moe_intermediate_size=32)
    with pytest.raises(ShapeMismatch, match="experts"):
        stitch(head, tiny("qwen3_5_moe", fused_experts=is_fused), tmp_path / "result")


def test_a_speculators_head_without_a_layer_config_is_refused(
    exported: Exported, tmp_path: Path
) -> None:
    source = exported("qwen3_5", "speculators")
    head = set_config(source, tmp_path / "head", transformer_layer_config=None)
    with pytest.raises(BadConfig, match="transformer_layer_config is missing"):
        open_head(head)


def test_a_speculators_head_with_a_stranger_is_refused(exported: Exported, tmp_path: Path) -> None:
    head = tmp_path / "head"
    shutil.copytree(exported("qwen3_5", "speculators"), head)
    contents = {**tensors(head), "mtp_layers.1.input_proj.weight": torch.zeros(2)}
    save_file(contents, head / "model.safetensors")
    with pytest.raises(UnexpectedTensor, match=r"mtp_layers\.1\.input_proj"):
        open_head(head)


def test_an_xllm_export_of_an_unknown_type_is_refused(exported: Exported, tmp_path: Path) -> None:
    head = set_config(exported("mimo", "xllm"), tmp_path / "head", model_type="phi9_mtp")
    with pytest.raises(ConfigError, match="'phi9_mtp' is not one that xLLM's export writes"):
        open_head(head)


def test_a_model_of_another_family_cannot_lend_its_trunk(
    tiny: Tiny, exported: Exported, tmp_path: Path
) -> None:
    head = exported("deepseek_v3", "sglang")
    with pytest.raises(UnsupportedFamily, match="Give the model that the head belongs to"):
        convert(head, "headstart", tmp_path / "out", tiny("mimo"))
    with pytest.raises(ShapeMismatch, match="Give the model that the head belongs to"):
        convert(head, "headstart", tmp_path / "out", tiny("deepseek_v3", hidden_size=128))


@pytest.mark.parametrize("script", ["export_mtp", "export_deepseek_mtp"])
def test_the_scripts_with_xllms_names_export_for_xllm(
    tiny: Tiny, exported: Exported, tmp_path: Path, script: str
) -> None:
    path = Path(__file__).parents[2] / "tools" / f"{script}.py"
    model, out = tiny("deepseek_v3"), tmp_path / "head"
    command = [sys.executable, str(path), "--input-dir", str(model), "--output-dir", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    assert differing(tensors(exported("deepseek_v3", "xllm")), tensors(out)) == set()
    assert config(exported("deepseek_v3", "xllm")) == config(out)


def test_the_model_type_can_be_given_as_xllm_spells_it(tiny: Tiny, tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "tools" / "export_mtp.py"
    command = [sys.executable, str(path), "--input-dir", str(tiny("deepseek_v3"))]
    command += ["--output-dir", str(tmp_path / "head"), "--model-type", "mimo"]
    failed = subprocess.run(command, capture_output=True, text=True)
    assert failed.returncode == 1
    assert "(mimo)" in failed.stderr


def test_tokenizer_files_travel_with_an_export(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("mimo")
    head = export(model, "xllm", tmp_path / "head")
    for name in ("tokenizer.json", "tokenizer_config.json", "configuration_mimo.py"):
        assert (head / name).read_bytes() == (model / name).read_bytes()


def test_stitching_keeps_sub_folders_and_index_metadata_and_says_what_it_leaves(
    tiny: Tiny, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny("deepseek_v3", shard_bytes=400_000), model)
    (model / "encoding/deep").mkdir(parents=True)
    (model / "encoding/deep/x.py").write_text("x = 1")
    (model / "original").mkdir()
    for name in ("pytorch_model.bin", "original/consolidated.00.pth", "x.gguf"):
        (model / name).write_bytes(b"weights")
    index = model / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["metadata"].update(producer="trainer 1.0", total_parameters=123)
    index.write_text(json.dumps(document))
    operation = plan_stitch(open_head(model), Checkpoint.open(model))
    out = written(operation, tmp_path / "out")
    assert (out / "encoding/deep/x.py").read_text() == "x = 1"
    assert not (out / "original").exists()
    assert json.loads((out / index.name).read_text()) == document
    notes = [c for c in operation.changes if c.startswith("left out: ")]
    assert len(notes) == 1
    for name in ("pytorch_model.bin", "original/consolidated.00.pth", "x.gguf"):
        assert name in notes[0]


def test_a_count_of_parameters_that_no_longer_holds_is_left_out(tiny: Tiny, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny("deepseek_v3", with_head=False, shard_bytes=400_000), model)
    index = model / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["metadata"]["total_parameters"] = 123
    index.write_text(json.dumps(document))
    operation = plan_stitch(open_head(tiny("deepseek_v3")), Checkpoint.open(model))
    assert "total_parameters" not in operation.plan.documents[index.name]["metadata"]
    assert any("total_parameters" in change for change in operation.changes)


def test_a_head_put_back_where_it_was_changes_nothing(tiny: Tiny, tmp_path: Path) -> None:
    """Copies of the embedding have the same bytes in another place of the file: no note."""
    model = tiny("deepseek_v3")
    moved = shutil.copytree(model, tmp_path / "moved")
    assert plan_stitch(open_head(model), Checkpoint.open(moved)).changes == ()


def test_a_head_of_another_model_is_said_to_be_one(tiny: Tiny, tmp_path: Path) -> None:
    """It fits by its sizes; by way of a head format, too, which knows where it is from."""
    model, other = Checkpoint.open(tiny("mimo")), tiny("mimo", seed=1)
    plan_export(open_head(other), "headstart").write(tmp_path / "head")
    plan_export(open_head(model.folder), "headstart").write(tmp_path / "own")
    said = f"the head comes from {other};"
    for source in (other, tmp_path / "head"):
        assert any(said in change for change in plan_stitch(open_head(source), model).changes)
    assert plan_stitch(open_head(tmp_path / "own"), model).changes == ()


def test_counts_of_one_are_written_as_such(tiny: Tiny) -> None:
    facts = plan_stitch(open_head(tiny("mimo")), Checkpoint.open(tiny("mimo"))).facts
    assert "1 module," in facts["head"]
    assert facts["model"].startswith("1 shard,")
    assert "1 shard written" in facts["result"]


@pytest.mark.parametrize("form", FORMATS)
def test_a_dense_head_of_a_trunk_with_experts_comes_back(
    tiny: Tiny, tmp_path: Path, form: str
) -> None:
    model = with_dense_head(tiny("deepseek_v3"), tmp_path / "model")
    head = export(model, form, tmp_path / "head")
    bare = tiny("deepseek_v3", with_head=False)
    assert differing(tensors(model), tensors(stitch(head, bare, tmp_path / "bare"))) == set()
    other = stitch(head, tiny("deepseek_v3"), tmp_path / "other")
    assert differing(tensors(model), tensors(other)) == set()
