"""Heads put into GGUF files, taken out and given back: trunks stay as they were, byte for byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import headstart
from support.gguf_models import LAYERS, random_bits, trunk_shards, write_head, write_trunk
from support.head_edits import differing, tensors
from support.tiny_fixture import Tiny

from headstart.checkpoint.gguf.fields import ARRAY, INT32, STRING, UINT32, Field, field
from headstart.checkpoint.gguf.header import read_gguf_header
from headstart.checkpoint.gguf.shard import GgufShard
from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.source import stored as stored_as
from headstart.checkpoint.writer import FolderPlan, write_folder
from headstart.errors import (
    BadConfig,
    BrokenFile,
    CheckpointError,
    ConfigError,
    HeadNotFound,
    HeadstartError,
    ShapeMismatch,
    UnsupportedFamily,
)
from headstart.heads.export import plan_export
from headstart.heads.formats import open_any, open_head, open_target
from headstart.heads.formats.gguf import open_gguf
from headstart.heads.formats.gguf.archs import Arch, arch_named
from headstart.heads.inspection import inspect
from headstart.heads.stitch import plan_restore, plan_stitch


def arch(name: str) -> Arch:
    found = arch_named(name)
    assert found is not None
    return found


QWEN, STEP = arch("qwen35"), arch("step35")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A head, a trunk for it, and the trunk with the head."""
    folder = tmp_path_factory.mktemp("gguf")
    head = write_head(QWEN, folder / "hf", random_bits())
    trunk = write_trunk(QWEN, folder / "trunk")
    plan_stitch(open_head(head), open_target(trunk)).write(folder / "whole")
    plan_export(open_head(head), "gguf", trunk=open_target(trunk)).write(folder / "draft")
    return {
        "head": head, "trunk": trunk, "whole": folder / "whole" / "trunk.gguf",
        "draft": folder / "draft" / "mtp-trunk.gguf",
    }  # fmt: skip


def stored(path: Path) -> dict[str, bytes]:
    """The bytes of every tensor."""
    found = {}
    for header in open_gguf(path).headers:
        data = header.file.read_bytes()
        found |= {n: data[i.start : i.end] for n, i in header.tensors.items()}
    return found


def keys(path: Path) -> dict[str, Field]:
    return read_gguf_header(path).fields


def test_every_trunk_tensor_and_key_is_as_it_was(made: dict[str, Path]) -> None:
    before, after = stored(made["trunk"]), stored(made["whole"])
    assert {name: after[name] for name in before} == before
    new = after.keys() - before.keys()
    assert new and all(name.startswith(f"blk.{LAYERS}.") for name in new)
    old, now = keys(made["trunk"]), keys(made["whole"])
    changed = {name for name in old if old[name] != now[name]}
    assert changed == {"qwen35.block_count", "qwen35.attention.recurrent_layers"}
    assert now["qwen35.block_count"].value == LAYERS + 1
    assert now["qwen35.attention.recurrent_layers"].value == [False] * (LAYERS + 1)
    assert list(now)[: len(old)] == list(old)
    assert now.keys() - old.keys() == {"qwen35.nextn_predict_layers", "headstart.head"}


def test_the_package_reads_what_was_written(made: dict[str, Path]) -> None:
    theirs = GGUFReader(made["whole"])
    ours = stored(made["whole"])
    assert {t.name: t.data.tobytes() for t in theirs.tensors} == ours
    assert theirs.fields["qwen35.nextn_predict_layers"].contents() == 1


def test_a_draft_file_has_what_llama_cpp_asks_for(made: dict[str, Path]) -> None:
    draft, trunk = stored(made["draft"]), stored(made["trunk"])
    assert {n for n in draft if not n.startswith("blk.")} == {
        "token_embd.weight", "output_norm.weight", "output.weight",
    }  # fmt: skip
    assert all(draft[n] == trunk[n] for n in draft if not n.startswith("blk."))
    assert {n.split(".")[1] for n in draft if n.startswith("blk.")} == {str(LAYERS)}
    names = keys(made["draft"])
    assert names["tokenizer.ggml.tokens"] == keys(made["trunk"])["tokenizer.ggml.tokens"]
    assert names["qwen35.block_count"].value == LAYERS + 1


def test_a_head_goes_from_file_to_file_with_its_bytes(
    made: dict[str, Path], tmp_path: Path
) -> None:
    draft, model = open_head(made["draft"]), open_target(made["trunk"])
    plan_restore(model, draft.origin, draft).write(tmp_path / "restored")
    assert (tmp_path / "restored" / "trunk.gguf").read_bytes() == made["whole"].read_bytes()
    plan_export(open_head(made["whole"]), "gguf").write(tmp_path / "draft")
    [again] = (tmp_path / "draft").glob("*.gguf")
    assert stored(again) == stored(made["draft"])


def test_a_head_comes_back_into_safetensors(tiny: Tiny, tmp_path: Path) -> None:
    """Out of a model, into GGUF, and back into the same model without its head."""
    original = tiny("qwen3_5")
    bare = tiny("qwen3_5", with_head=False)
    hidden = field("qwen35.embedding_length", 256, UINT32)
    shards = trunk_shards(QWEN)
    shard = shards["trunk.gguf"]
    fields = [
        hidden if f.name == hidden.name else f.changed(4) if f.name.endswith("block_count") else f
        for f in shard.fields
        if not f.name.endswith("recurrent_layers")
    ]
    new = type(shard)(shard.tensors, tuple(fields))
    write_folder(FolderPlan({"t.gguf": new}), tmp_path / "trunk", provenance={})
    trunk = open_target(tmp_path / "trunk" / "t.gguf")
    plan_stitch(open_head(original), trunk).write(tmp_path / "whole")
    head = open_head(tmp_path / "whole")
    plan_restore(open_target(bare), head.origin, head).write(tmp_path / "restored")
    assert differing(tensors(original), tensors(tmp_path / "restored")) == set()
    plan_export(head, "headstart").write(tmp_path / "head")
    assert open_head(tmp_path / "head").num_modules == 1
    said = json.loads((tmp_path / "head" / "headstart.json").read_text())["changes"]
    assert any("made of the GGUF file's keys" in change for change in said)


def test_a_head_that_is_there_is_replaced(made: dict[str, Path], tmp_path: Path) -> None:
    other = write_head(QWEN, tmp_path / "hf", random_bits(5))
    model = open_target(made["whole"])
    plan_stitch(open_head(other), model, head_type="q8_0").write(tmp_path / "out")
    found = read_gguf_header(tmp_path / "out" / "trunk.gguf")
    assert found.tensors[f"blk.{LAYERS}.ffn_up.weight"].dtype == "Q8_0"
    assert found.tensors[f"blk.{LAYERS}.attn_norm.weight"].dtype == "F32"
    assert found.tensors.keys() == stored(made["whole"]).keys()
    assert keys(tmp_path / "out" / "trunk.gguf")["qwen35.block_count"].value == LAYERS + 1


def test_a_head_of_a_file_can_change_its_type(made: dict[str, Path], tmp_path: Path) -> None:
    head = open_head(made["whole"])
    operation = plan_export(head, "gguf", head_type="q8_0")
    assert operation.changes[0] == "matrices were BF16 and are Q8_0 now"
    operation.write(tmp_path / "q8")
    [path] = (tmp_path / "q8").glob("*.gguf")
    found = read_gguf_header(path).tensors
    assert {found[f"blk.2.{n}.weight"].dtype for n in ("ffn_up", "attn_q")} == {"Q8_0"}
    assert found["blk.2.attn_norm.weight"].dtype == "F32"
    with pytest.raises(UnsupportedFamily, match=r"Q8_0 cannot be turned into Q4_0 here; keep"):
        plan_export(open_head(path), "gguf", head_type="q4_0")
    plan_export(open_head(path), "gguf", head_type="bf16").write(tmp_path / "bf16")


def test_a_head_in_f32_can_change_its_type(made: dict[str, Path], tmp_path: Path) -> None:
    plan_export(open_head(made["whole"]), "gguf", head_type="f32").write(tmp_path / "f32")
    [path] = (tmp_path / "f32").glob("*.gguf")
    operation = plan_export(open_head(path), "gguf", head_type="q8_0")
    assert operation.changes[0] == "matrices were F32 and are Q8_0 now"
    operation.write(tmp_path / "q8")
    [again] = (tmp_path / "q8").glob("*.gguf")
    found = read_gguf_header(again).tensors
    assert found["blk.2.ffn_up.weight"].dtype == "Q8_0"
    assert found["blk.2.attn_norm.weight"].dtype == "F32"


def test_a_type_that_a_head_has_already_changes_nothing(made: dict[str, Path]) -> None:
    operation = plan_export(open_head(made["whole"]), "gguf", head_type="bf16")
    assert not any("matrices were" in change for change in operation.changes)


def test_factors_of_rotation_go_into_a_draft_file(made: dict[str, Path], tmp_path: Path) -> None:
    """The converter of llama.cpp writes them for Step-3.5."""
    shard = trunk_shards(QWEN)["trunk.gguf"]
    factors = TensorSource("F32", (16,), lambda: (bytes(range(64)),), is_copy=False)
    new = type(shard)({**shard.tensors, "rope_freqs.weight": factors}, shard.fields)
    write_folder(FolderPlan({"best-of-qwen3.gguf": new}), tmp_path / "t", provenance={})
    trunk = open_target(tmp_path / "t" / "best-of-qwen3.gguf")
    plan_export(open_head(made["head"]), "gguf", trunk=trunk).write(tmp_path / "draft")
    draft = tmp_path / "draft" / "mtp-best-of-qwen3.gguf"
    assert stored(draft)["rope_freqs.weight"] == bytes(range(64))


def test_limits_of_activations_are_those_of_the_heads_layers() -> None:
    fields = {"num_hidden_layers": 2, "swiglu_limits": [None, 7.0, None, 5.0]}
    values = [STEP.layer_values(fields, module)["swiglu_clamp_exp"] for module in range(3)]
    assert values == [0.0, 5.0, 0.0]


def test_split_files_stay_split(tmp_path: Path) -> None:
    head = open_head(write_head(STEP, tmp_path / "hf", random_bits(), num_modules=3))
    trunk = write_trunk(STEP, tmp_path / "trunk", splits=3)
    before = stored(trunk)
    plan_stitch(head, open_target(trunk)).write(tmp_path / "out")
    files = sorted((tmp_path / "out").glob("*.gguf"))
    assert [f.name for f in files] == [f"trunk-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    after = stored(files[2])  # any of them opens all
    assert {name: after[name] for name in before} == before
    for number, file in enumerate(files):
        assert keys(file)["split.no"].value == number
        assert keys(file)["split.tensors.count"].value == len(after)
    now = keys(files[0])
    assert now["step35.attention.head_count"].value == [2] * (LAYERS + 3)
    pattern = now["step35.attention.sliding_window_pattern"].value
    assert pattern[LAYERS:] == [True] * 3
    assert now["step35.rope.dimension_sections"].length == 4
    back = open_head(files[0])
    assert back.tensors.keys() == head.tensors.keys()


def test_a_trunk_that_declares_a_head_it_lost_is_not_counted_twice(
    made: dict[str, Path], tmp_path: Path
) -> None:
    trunk = write_trunk(QWEN, tmp_path / "trunk", declared=1)
    head = open_head(made["head"])
    plan_restore(open_target(trunk), head.origin, head).write(tmp_path / "out")
    now = keys(tmp_path / "out" / "trunk.gguf")
    assert now["qwen35.block_count"].value == LAYERS + 1
    assert now["qwen35.nextn_predict_layers"].value == 1


REFUSALS: dict[str, tuple[type[HeadstartError], str, tuple[Field, ...]]] = {
    "layers": (ShapeMismatch, "trunk of 2 layers, .* has 3", (
        field("qwen35.block_count", 3, UINT32),)),
    "width": (ShapeMismatch, r"eh_proj\.weight is \[64, 128\], .* has width 128", (
        field("qwen35.embedding_length", 128, UINT32),)),
    "architecture": (UnsupportedFamily, r"qwen35 in llama\.cpp\), .* is 'llama'", (
        field("general.architecture", "llama", STRING),
        field("llama.block_count", 2, UINT32))),
    "tokens": (ShapeMismatch, "have other tokens", (
        field("tokenizer.ggml.tokens", ["x"] * 16, ARRAY, STRING),)),
}  # fmt: skip


def changed_trunk(out: Path, *changes: Field) -> Path:
    shard = trunk_shards(QWEN)["trunk.gguf"]
    fields = {f.name: f for f in shard.fields} | {f.name: f for f in changes}
    new = type(shard)(shard.tensors, tuple(fields.values()))
    write_folder(FolderPlan({"trunk.gguf": new}), out, provenance={})
    return out / "trunk.gguf"


@pytest.mark.parametrize("case", REFUSALS)
def test_a_trunk_of_another_model_is_refused(
    case: str, made: dict[str, Path], tmp_path: Path
) -> None:
    error, said, changes = REFUSALS[case]
    trunk = changed_trunk(tmp_path / "trunk", *changes)
    with pytest.raises(error, match=said):
        plan_stitch(open_head(made["draft"]), open_target(trunk))


def test_what_cannot_be_done_is_said(
    made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, whole = open_head(made["head"]), open_target(made["whole"])
    with pytest.raises(CheckpointError, match="there is nothing to restore"):
        plan_restore(whole, head.origin, head)
    with pytest.raises(CheckpointError, match="holds a head alone"):
        plan_stitch(head, open_target(made["draft"]))
    with pytest.raises(HeadNotFound, match=r"has no head. Restore it: headstart restore"):
        open_head(made["trunk"])
    with pytest.raises(
        ConfigError, match=r"--head-type is 'q4_k_m'; .* of q2_k, .* llama-quantize"
    ):
        plan_stitch(head, whole, head_type="q4_k_m")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"Q4_K are made by llama\.cpp's llama-quantize"):
        plan_stitch(head, whole, head_type="q4_k")
    with pytest.raises(ConfigError, match="--head-type is for GGUF and MLX"):
        plan_stitch(head, open_target(made["head"]), head_type="q8_0")
    with pytest.raises(CheckpointError, match="does not exist; expected a GGUF file"):
        open_target(tmp_path / "none.gguf")


def test_a_split_with_a_file_missing_or_of_another_is_refused(tmp_path: Path) -> None:
    trunk = write_trunk(QWEN, tmp_path / "trunk", splits=2)
    second = trunk.with_name("trunk-00002-of-00002.gguf")
    shutil.copy(trunk, tmp_path / "first.gguf")
    second.rename(tmp_path / "second.gguf")
    with pytest.raises(BrokenFile, match=r"00002-of-00002.gguf is missing beside"):
        open_target(trunk)
    shutil.copy(trunk, second)
    with pytest.raises(BrokenFile, match=r"expected .* Download all files of the split"):
        open_target(trunk)


def test_arrays_that_nobody_can_extend_are_refused(made: dict[str, Path], tmp_path: Path) -> None:
    odd = field("qwen35.attention.head_count_kv", [2, 4], ARRAY, INT32)
    trunk = changed_trunk(tmp_path / "trunk", odd)
    with pytest.raises(UnsupportedFamily, match=r"head_count_kv with one value per layer"):
        plan_stitch(open_head(made["head"]), open_target(trunk))


def test_a_key_that_cannot_hold_its_new_value_is_refused(
    made: dict[str, Path], tmp_path: Path
) -> None:
    odd = field("qwen35.attention.recurrent_layers", ["a"] * LAYERS, ARRAY, STRING)
    trunk = changed_trunk(tmp_path / "trunk", odd)
    said = r"qwen35\.attention\.recurrent_layers is an array of string .* cannot hold \['a'"
    with pytest.raises(BadConfig, match=said):
        plan_stitch(open_head(made["head"]), open_target(trunk)).write(tmp_path / "out")


def test_a_past_that_is_not_ours_is_refused(made: dict[str, Path], tmp_path: Path) -> None:
    data = made["whole"].read_bytes()
    text = b'"left_out":[]'
    assert data.count(text) == 1
    (tmp_path / "x.gguf").write_bytes(data.replace(text, b'"training":[]'))
    with pytest.raises(BadConfig, match=r"headstart.head is not what Headstart writes"):
        open_head(tmp_path / "x.gguf")


def test_a_record_that_is_not_ours_is_refused(made: dict[str, Path], tmp_path: Path) -> None:
    data = made["whole"].read_bytes()
    text = b'"root":""'
    assert data.count(text) == 1
    (tmp_path / "x.gguf").write_bytes(data.replace(text, b'"root":0 '))
    with pytest.raises(BadConfig, match=r"headstart.head is not what Headstart writes"):
        open_head(tmp_path / "x.gguf")


def report(path: Path) -> Any:
    return inspect(open_any(path))


def test_inspect_tells_the_five_states(made: dict[str, Path], tmp_path: Path) -> None:
    whole, trunk = report(made["whole"]), report(made["trunk"])
    assert (whole.head.state, whole.family.name, whole.format) == ("complete", "qwen3_5", "gguf")
    assert whole.facts["llama.cpp"] == "drafts with heads of qwen35 since b9180"
    assert whole.head.kv_bytes_per_token > 0 and whole.trunk.dtype.startswith("Q4_K")
    assert (trunk.head.state, trunk.warnings) == ("absent", ())
    declared = report(write_trunk(QWEN, tmp_path / "declared", declared=1))
    assert declared.head.state == "declared-but-missing"
    assert "llama.cpp does not load such files of qwen35" in declared.warnings[0]
    for name, gone, state in (
        ("partial", b"blk.2.ffn_up.weight", "partial"),
        ("undeclared", b"qwen35.nextn_predict_layers", "undeclared"),
    ):
        data = made["whole"].read_bytes()
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(data.replace(gone, gone.replace(b"e", b"x").replace(b"f", b"x")))
        found = report(path)
        assert (found.head.state, len(found.warnings)) == (state, 1)


def test_whose_a_trunk_is_is_left_open_where_models_without_heads_share_its_name(
    tmp_path: Path,
) -> None:
    shared = arch("deepseek2")
    assert report(write_trunk(shared, tmp_path / "plain")).family is None
    declared = report(write_trunk(shared, tmp_path / "declared", declared=1))
    assert declared.family.name == "glm4_moe_lite"
    assert "so llama.cpp cannot draft" in declared.warnings[0]


def test_inspect_warns_of_files_that_do_not_load(made: dict[str, Path], tmp_path: Path) -> None:
    data = made["draft"].read_bytes()
    (tmp_path / "zero.gguf").write_bytes(data.replace(b"blk.2.", b"blk.0."))
    assert (
        "blocks start at blk.0; llama.cpp looks for blk.2"
        in report(tmp_path / "zero.gguf").warnings[0]
    )
    (tmp_path / "bare.gguf").write_bytes(data.replace(b"token_embd.", b"token_xxxx."))
    assert "has no token_embd.weight" in report(tmp_path / "bare.gguf").warnings[0]
    # numbered anew, it is a head that loads
    plan_export(open_head(tmp_path / "zero.gguf"), "gguf").write(tmp_path / "again")
    [again] = (tmp_path / "again").glob("*.gguf")
    assert report(again).warnings == ()
    assert stored(again) == stored(made["draft"])


def test_inspect_warns_of_heads_in_coarse_types(made: dict[str, Path], tmp_path: Path) -> None:
    found = read_gguf_header(made["whole"])
    tensors = {name: stored_as(info) for name, info in found.tensors.items()}
    coarse = TensorSource("IQ2_S", (96, 256), lambda: (bytes(96 * 82),), is_copy=False)
    shard = GgufShard({**tensors, "blk.2.ffn_up.weight": coarse}, tuple(found.fields.values()))
    write_folder(FolderPlan({"c.gguf": shard}), tmp_path / "out", provenance={})
    warning = report(tmp_path / "out" / "c.gguf").warnings[0]
    assert "stored as IQ2_S: llama-imatrix never runs heads" in warning


def test_commands_take_gguf_files(made: dict[str, Path], tmp_path: Path) -> None:
    out = headstart("inspect", str(made["whole"]), "--json")
    document = json.loads(out.stdout)
    assert (document["format"], document["head"]["state"]) == ("gguf", "complete")
    assert "llama-server" in document["engines"]["llamacpp"]["command"]
    refused = headstart("stitch", str(made["head"]), str(made["trunk"]), "--out",
                        str(made["trunk"].parent))  # fmt: skip
    assert refused.returncode == 1 and "overlaps the input" in refused.stderr
    named = headstart("stitch", str(made["head"]), str(made["trunk"]), "--out",
                      str(tmp_path / "x.gguf"))  # fmt: skip
    assert named.returncode == 2 and "results are folders" in named.stderr
    assert "of the trunk" not in headstart("inspect", str(made["draft"])).stdout
    run = headstart("generate", str(made["whole"]), "hi")
    assert run.returncode == 1 and "attention.head_count is None; expected a whole" in run.stderr


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_files_end_in_one_line(data: st.DataObject, made: dict[str, Path]) -> None:
    whole = made["whole"].read_bytes()
    start = data.draw(st.integers(0, 3000))
    patch = data.draw(st.binary(min_size=1, max_size=9))
    path = made["whole"].parent.parent / "damaged.gguf"
    path.write_bytes(whole[:start] + patch + whole[start + len(patch) :])
    for do in (report, open_head):
        try:
            do(path)
        except HeadstartError as error:
            assert "\n" not in str(error) and len(str(error)) < 800
