"""GGUF trunks in the engine: the file is the checkpoint that it was made of, in every type."""

from __future__ import annotations

import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import gguf_trunks
from support.engine_runs import assert_head_is_alive, greedy, ids_of
from support.gguf_trunks import PRE, VARIANTS, WITHOUT_HEAD, Speller, encoded, fixture, write_trunk
from support.head_edits import tensors
from support.long_runs import unless_long
from support.tiny_fixture import Tiny

from headstart.checkpoint.gguf.fields import FLOAT32, STRING, UINT32, Field, field
from headstart.checkpoint.gguf.shard import GgufShard
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.source import TensorSource, stored
from headstart.checkpoint.values import load
from headstart.checkpoint.writer import FolderPlan, write_folder
from headstart.engine.engine import Engine
from headstart.errors import (
    BadConfig,
    CheckpointError,
    ConfigError,
    HeadNotFound,
    MissingTensor,
    ShapeMismatch,
    UnexpectedTensor,
    UnsupportedFamily,
)
from headstart.heads.export import plan_export
from headstart.heads.formats import open_head, open_runnable, open_target
from headstart.heads.formats.gguf import open_gguf
from headstart.heads.stitch import plan_stitch
from headstart.models.build import build, has_head
from headstart.models.config_reader import model_config
from headstart.models.documents import Documents
from headstart.models.unroll import trunk_states

ALL = list(VARIANTS)
FLOAT64 = 12
HEADLESS = (*WITHOUT_HEAD, "deepseek_v3", "ernie4_5_moe")  # llama.cpp keeps no head of these
# Embeddings are made by a QR decomposition, which other machines round otherwise; so are
# exponentials.
UNSTEADY = ("token_embd.weight", "output.weight")
PROMPTS = [[3, 17, 42, 99, 5, 8, 61], [7], [100, 101, 4]]


def model_of(tiny: Tiny, variant: str) -> Path:
    return tiny(variant, with_head=variant not in WITHOUT_HEAD, **VARIANTS[variant])


def stitched(model: Path, trunk: Path, out: Path, **options: Any) -> Path:
    plan_stitch(open_head(model), open_target(trunk), **options).write(out)
    [path] = out.glob("*.gguf")
    return path


def logits(path: Path, ids: list[int] | None = None) -> torch.Tensor:
    built = build(open_runnable(path), device="cpu", dtype="float32", max_model_len=64)
    tokens = torch.tensor(ids or PROMPTS[0])
    states = trunk_states(built.trunk, tokens, Documents((len(tokens),)), "after_final_norm")
    return built.trunk.logits(states)


def answers(path: Path, num_drafts: int, head: Path | None = None) -> list[Any]:
    engine = Engine(
        path, head, device="cpu", dtype="float32", speculate=num_drafts, max_model_len=64,
        kernels="off",
    )  # fmt: skip
    return engine.generate(PROMPTS, greedy(12))


@pytest.mark.parametrize("variant", ALL)
def test_trunks_of_these_tests_are_those_of_llama_cpps_converter(tiny: Tiny, variant: str) -> None:
    made = fixture(variant)
    speller = Speller(model_of(tiny, variant), made["arch"])
    for name, listed in made["tensors"].items():
        kind, shape, wanted = listed.split()
        value = speller.value(name)
        assert "x".join(map(str, value.shape)) == shape, name
        if name not in UNSTEADY and not name.endswith("ssm_a"):
            assert f"{zlib.crc32(encoded(value, kind)):08x}" == wanted, name


@pytest.mark.parametrize("variant", ALL)
def test_a_file_is_seen_as_the_checkpoint_that_it_was_made_of(
    tiny: Tiny, variant: str, tmp_path: Path
) -> None:
    model = model_of(tiny, variant)
    file = write_trunk(model, variant, tmp_path / "trunk")
    if variant not in HEADLESS:
        file = stitched(model, file, tmp_path / "whole")
    found = open_runnable(file)
    expected = {name.replace("language_model.", ""): v for name, v in tensors(model).items()}
    apart = {name for name in expected if "in_proj_qkvz" in name or "in_proj_ba" in name}
    lost = expected.keys() - found.tensors.keys() - apart
    assert not lost or variant in HEADLESS
    for name in found.tensors.keys() & expected.keys():
        value, wanted = load(found.source(name)), expected[name].float()
        if name.endswith("norm.weight"):  # FP32 keeps no more of a small one beside 1
            assert torch.equal(value + 1, wanted + 1), name
        else:
            assert torch.equal(value.float(), wanted), name
    one, other = (model_config(c.config.fields) for c in (found, open_runnable(model)))
    assert one == other


# family -> the type of its matrices in usual runs
TYPES = {"llama": "Q4_0", "qwen3_5_text": "Q8_0", "glm4_moe_lite": "Q5_0", "step3p5": "Q4_1"}
# Beside a quantised matrix a bias is added to the product, else inside it: rounded otherwise.
WITH_BIASES = ("qwen2", "glm4_moe")
KINDS = sorted(set(TYPES.values()))
CASES = [(variant, kind) for variant in ALL for kind in KINDS]


@pytest.mark.parametrize(("variant", "kind"), unless_long(list(TYPES.items()), CASES))
def test_logits_are_those_of_the_dequantised_checkpoint(
    tiny: Tiny, variant: str, kind: str, tmp_path: Path
) -> None:
    model = model_of(tiny, variant)
    plain = gguf_trunks.dequantised(model, variant, kind, tmp_path / "plain")
    found = logits(write_trunk(model, variant, tmp_path / "trunk", kind=kind))
    if variant in WITH_BIASES:
        torch.testing.assert_close(found, logits(plain), rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(found, logits(plain))
    assert not torch.equal(found, logits(model))  # control: the type shows


DRAFTING = [variant for variant in ALL if variant not in HEADLESS]


@pytest.mark.parametrize("variant", unless_long(["glm4_moe"], DRAFTING))
def test_texts_and_drafts_are_those_of_the_dequantised_checkpoint(
    tiny: Tiny, variant: str, tmp_path: Path
) -> None:
    kind = KINDS[DRAFTING.index(variant) % len(KINDS)]
    model = model_of(tiny, variant)
    plain = gguf_trunks.dequantised(model, variant, kind, tmp_path / "plain")
    trunk = write_trunk(model, variant, tmp_path / "trunk", kind=kind)
    whole = stitched(model, trunk, tmp_path / "whole")
    expected = ids_of(answers(plain, 0))
    found = [answers(whole, num_drafts) for num_drafts in range(4)]
    assert [ids_of(each) for each in found] == [expected] * 4
    assert_head_is_alive(found[3])
    counted = [
        [output.stats.acceptance.as_json() for result in each for output in result.outputs]
        for each in (found[3], answers(plain, 3))
    ]
    assert counted[0] == counted[1]  # the same drafts, too


def test_what_is_quantised_stays_so_and_its_cost_is_said(tiny: Tiny, tmp_path: Path) -> None:
    model = model_of(tiny, "qwen2")
    for kind, said in (
        ("Q8_0", "weights stay as stored: GGUF Q8_0"),
        ("Q4_0", "weights stay as stored: GGUF Q4_0"),
        ("Q4_1", "dequantised to float32 at load"),
    ):
        file = write_trunk(model, "qwen2", tmp_path / kind, kind=kind)
        built = build(open_runnable(file), device="cpu", dtype="float32", max_model_len=64)
        note = max((n for n in built.notes if f"GGUF {kind}" in n), key=len)
        assert any(said in each for each in built.notes), built.notes
    assert "(GGUF Q4_1): no backend computes with this format" in note and "in place of" in note


def test_a_head_in_a_file_of_its_own_drafts_for_the_trunk(tiny: Tiny, tmp_path: Path) -> None:
    model = model_of(tiny, "glm4_moe")
    trunk = write_trunk(model, "glm4_moe", tmp_path / "trunk", kind="Q8_0")
    plan_export(open_head(model), "gguf", trunk=open_target(trunk), head_type="q8_0").write(
        tmp_path / "draft"
    )
    [draft] = (tmp_path / "draft").glob("*.gguf")
    plain = ids_of(answers(trunk, 0))
    for head in (draft, model):
        found = answers(trunk, 3, head)
        assert ids_of(found) == plain
        assert_head_is_alive(found)
    with pytest.raises(CheckpointError, match="is a standalone gguf head, not a model"):
        Engine(draft)
    other = tiny("glm4_moe", vocab_size=64, hidden_size=128)
    with pytest.raises(ConfigError, match="is for a model with hidden_size 256, the model has 128"):
        Engine(other, draft, device="cpu")


@pytest.mark.parametrize("what", ["norms", "pairs"])
def test_a_change_of_values_that_is_not_undone_shows(tiny: Tiny, tmp_path: Path, what: str) -> None:
    """Controls: a trunk of Qwen whose norms lack the 1, a Llama whose rows were not paired."""
    variant = "qwen3_5_text" if what == "norms" else "llama"
    model = model_of(tiny, variant)

    def change(name: str, value: Any) -> Any:
        if what == "norms":
            return value - np.float32(1) if name.endswith("attn_norm.weight") else value
        return value[::-1] if ".attn_q." in name else value

    wrong = write_trunk(model, variant, tmp_path / "wrong", change=change)
    right = write_trunk(model, variant, tmp_path / "right")
    assert torch.equal(logits(right), logits(model))
    assert not torch.allclose(logits(wrong), logits(model), atol=1e-3)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "key": (
        {"fields": (field("qwen2.attention.scale", 0.5, FLOAT32),)},
        UnsupportedFamily, "sets qwen2.attention.scale, which is not known of qwen2",
    ),
    "rope": (
        {"fields": (field("qwen2.rope.dimension_count", 32, UINT32),)},
        UnsupportedFamily, "rotates 32 of 64 values of a head; expected all for qwen2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_engine_does_not_compute_is_refused_by_name(
    tiny: Tiny, tmp_path: Path, case: str
) -> None:
    options, error, said = REFUSED[case]
    file = write_trunk(model_of(tiny, "qwen2"), "qwen2", tmp_path / "x", **options)
    with pytest.raises(error, match=said):
        open_runnable(file)


def again(file: Path, *changed: Field, without: str = "", to: str = "again") -> Path:
    """The same file with other keys, and without tensors and keys of that name."""
    model = open_gguf(file)
    fields = {n: each for n, each in model.fields.items() if not without or without not in n}
    fields |= {each.name: each for each in changed}
    held = {n: stored(t) for n, t in model.tensors.items() if not without or without not in n}
    shard = GgufShard(held, tuple(fields.values()))
    write_folder(FolderPlan({"x.gguf": shard}), file.parent / to, provenance={})
    return file.parent / to / "x.gguf"


def test_a_damaged_head_keeps_no_file_from_running_without_it(tiny: Tiny, tmp_path: Path) -> None:
    model = model_of(tiny, "glm4_moe")
    trunk = write_trunk(model, "glm4_moe", tmp_path / "trunk")
    damaged = again(stitched(model, trunk, tmp_path / "whole"), without="nextn.hnorm.weight")
    expected = ids_of(answers(trunk, 0))
    assert ids_of(answers(damaged, 0)) == expected
    found = answers(damaged, 3, model)
    assert ids_of(found) == expected
    assert_head_is_alive(found)
    assert any("is not read: " in note for note in open_runnable(damaged).remarks())
    with pytest.raises(HeadNotFound, match=r"the head is not whole, 1 tensor missing.*Restore it"):
        answers(damaged, 3)


@pytest.mark.parametrize("pre", ["glm4", "deepseek-v3", "odd"])
def test_the_tokenizer_tells_deepseek_from_glm(tiny: Tiny, tmp_path: Path, pre: str) -> None:
    model = model_of(tiny, "glm4_moe_lite")
    trunk = write_trunk(
        model, "glm4_moe_lite", tmp_path / "trunk", fields=(field(PRE, pre, STRING),)
    )
    whole = stitched(model, trunk, tmp_path / "whole")
    if pre == "odd":
        with pytest.raises(UnsupportedFamily, match=r"pre-tokenizer 'odd'; expected glm4 or"):
            open_runnable(whole)
        return
    found = open_runnable(whole)
    is_glm = pre == "glm4"
    assert found.config.model_type == ("glm4_moe_lite" if is_glm else "deepseek_v3")
    assert ("Glm" in found.config.architectures[0]) == is_glm
    assert any(name.endswith("eh_proj.weight") for name in found.tensors) == is_glm
    assert not is_glm or has_head(found)
    if not is_glm:
        with pytest.raises(HeadNotFound, match="read as those of glm4_moe_lite alone"):
            has_head(found)


def test_hostile_values_of_keys_are_refused_in_one_line(tiny: Tiny, tmp_path: Path) -> None:
    kinds = "attention.recurrent_layers"
    hybrid = write_trunk(model_of(tiny, "qwen3_5_text"), "qwen3_5_text", tmp_path / "hybrid")
    every = again(hybrid, field("qwen35.full_attention_interval", 0, UINT32), without=kinds)
    with pytest.raises(BadConfig, match=r"_interval is 0; expected a whole number of at least 1"):
        open_runnable(every)
    trunk = write_trunk(model_of(tiny, "qwen2"), "qwen2", tmp_path / "trunk")
    for number, (key, value) in enumerate((("factor", 1e300), ("yarn_log_multiplier", 1e38))):
        name = f"qwen2.rope.scaling.{key}"
        odd = again(trunk, field(name, value, FLOAT64), to=f"odd-{number}")
        with pytest.raises(BadConfig, match=rf"{name} is 1e\+\d+; expected a number"):
            open_runnable(odd)

    def flat(name: str, value: Any) -> Any:
        return value.reshape(-1) if name.endswith("ssm_ba.weight") else value

    next_ = model_of(tiny, "qwen3_next")
    with pytest.raises(ShapeMismatch, match=r"ssm_ba\.weight has shape .* ask for a matrix of"):
        open_runnable(write_trunk(next_, "qwen3_next", tmp_path / "flat", change=flat))


def test_claimed_dimensions_take_no_memory(tiny: Tiny, tmp_path: Path) -> None:
    file = write_trunk(model_of(tiny, "llama"), "llama", tmp_path / "trunk")
    model = open_gguf(file)
    factors = np.ones(32, np.float32).tobytes()
    held = {n: stored(t) for n, t in model.tensors.items()}
    held["rope_freqs.weight"] = TensorSource("F32", (32,), lambda: (factors,), is_copy=False)
    claimed = field("llama.rope.dimension_count", 1 << 24, UINT32)
    fields = {**model.fields, claimed.name: claimed}
    shard = GgufShard(held, tuple(fields.values()))
    write_folder(FolderPlan({"x.gguf": shard}), tmp_path / "claims", provenance={})
    tracemalloc.start()
    try:
        with pytest.raises(UnsupportedFamily, match="in another way than Llama 3"):
            open_runnable(tmp_path / "claims" / "x.gguf")
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def renamed(file: Path, old: bytes, new: bytes) -> Path:
    assert len(old) == len(new)
    out = file.with_name("other.gguf")
    out.write_bytes(file.read_bytes().replace(old, new))
    return out


def test_other_architectures_and_tensors_are_refused_by_name(tiny: Tiny, tmp_path: Path) -> None:
    file = write_trunk(model_of(tiny, "qwen2"), "qwen2", tmp_path / "x")
    with pytest.raises(
        UnsupportedFamily, match=r"'qwen9'; expected one of llama, .*llama.cpp does"
    ):
        open_runnable(renamed(file, b"qwen2", b"qwen9"))
    with pytest.raises(UnexpectedTensor, match=r"blk.1.odd_up.weight has no place in a layer"):
        open_runnable(renamed(file, b"blk.1.ffn_up.weight", b"blk.1.odd_up.weight"))
    with pytest.raises(MissingTensor, match=r"has no output_norm\.weight"):
        open_runnable(renamed(file, b"output_norm.weight", b"output_nurm.weight"))


def test_a_file_is_no_place_to_train_from(tiny: Tiny, tmp_path: Path) -> None:
    file = write_trunk(model_of(tiny, "qwen2"), "qwen2", tmp_path / "x")
    with pytest.raises(CheckpointError, match="training, graft and quantize do not"):
        Checkpoint.open(file)
