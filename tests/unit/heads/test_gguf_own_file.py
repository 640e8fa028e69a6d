"""GGUF files with a head alone, made of safetensors: keys, tokenizer, tables, draft vocabulary."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.head_edits import differing, restore, tensors
from support.tiny_fixture import Tiny

from headstart.checkpoint.gguf.fields import KIND_NAMES, Field
from headstart.checkpoint.gguf.shard import GgufShard
from headstart.errors import (
    BadConfig,
    ConfigError,
    DataError,
    HeadstartError,
    MissingTensor,
    UnsupportedFamily,
)
from headstart.heads.export import plan_convert, plan_export
from headstart.heads.formats import open_any, open_head
from headstart.heads.formats.gguf import GgufModel, open_gguf
from headstart.heads.formats.gguf.archs import arch_of
from headstart.heads.formats.gguf.keys import as_fields, step_keys
from headstart.heads.formats.gguf.reduced import reduced, refuse_in_models
from headstart.heads.head import config_fields
from headstart.heads.inspection import inspect
from headstart.vocab.draft_vocab import DraftVocab
from headstart.vocab.files import read, write

FIXTURE = Path(__file__).parents[2] / "fixtures" / "gguf_keys.json"
THEIRS: dict[str, dict[str, list[Any]]] = json.loads(FIXTURE.read_text())
# as scripts/interop/gguf_check.py gave them to llama.cpp's converter (v0.5.0, --mtp)
_KINDS = [f"{kind}_attention" for kind in ("full", "sliding", "full", *["sliding"] * 3)]
CHANGES: dict[str, dict[str, Any]] = {
    "step3p5": {"layer_types": _KINDS, "partial_rotary_factors": [0.5, 1.0, 0.5, 1.0, 1.0, 1.0]}
}
WORDS = 120


def shown(field: Field) -> list[Any]:
    item = field.item_kind
    kind = KIND_NAMES[field.kind] if item is None else f"array of {KIND_NAMES[item]}"
    return [kind, field.value]


@pytest.mark.parametrize("name", THEIRS)
def test_keys_are_those_of_llama_cpps_converter(name: str, tiny: Tiny) -> None:
    head = open_head(tiny(name, **CHANGES.get(name, {})))
    arch = arch_of(head.family.name)
    assert arch is not None and arch.keys_of is not None
    ours = as_fields(arch.name, arch.keys_of(config_fields(head.config), head.num_modules))
    counts = (f"{arch.name}.block_count", f"{arch.name}.nextn_predict_layers")
    theirs = {key: value for key, value in THEIRS[name].items() if key not in counts}
    assert {field.name: shown(field) for field in ours} == theirs


def test_yarn_and_two_bases_are_written_as_the_converter_does(tiny: Tiny) -> None:
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
            "beta_slow": 1, "mscale_all_dim": 1.0}  # fmt: skip
    fields = config_fields(open_head(tiny("deepseek_v32", rope_scaling=yarn)).config)
    arch = arch_of("deepseek_v32")
    assert arch is not None and arch.keys_of is not None
    keys = arch.keys_of(fields, 1)
    assert keys["rope.scaling.type"] == "yarn" and keys["rope.scaling.factor"] == 40.0
    assert keys["rope.scaling.original_context_length"] == 4096
    assert keys["rope.scaling.yarn_log_multiplier"] == pytest.approx(0.1)
    step = config_fields(open_head(tiny("step3p5")).config)
    keys = step_keys({**step, "rope_theta": [5e6, 1e4], "swiglu_limits": [None, 7]}, 3)
    assert (keys["rope.freq_base"], keys["rope.freq_base_swa"]) == (5e6, 1e4)
    assert keys["swiglu_clamp_exp"][:3] == [0.0, 7.0, 0.0]


def with_tokenizer(model: Path, out: Path, kind: str = "BPE") -> Path:
    """A copy of a model that has a byte-pair tokenizer with fewer words than the embedding."""
    shutil.copytree(model, out)
    inner = {"type": kind, "vocab": {f"t{i}": i for i in range(WORDS)}, "merges": [["t", " 2"]]}
    added = [
        {"id": 3, "content": "<s>", "special": True},
        {"id": 4, "content": "<|x|>", "special": False},
        {"id": 5, "content": "<tool>", "special": False},
    ]
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "t7", "add_bos_token": False}
    (out / "tokenizer.json").write_text(json.dumps({"model": inner, "added_tokens": added}))
    (out / "tokenizer_config.json").write_text(json.dumps(settings))
    return out


def made(model: Path, out: Path, **options: Any) -> GgufModel:
    plan_export(open_head(model), "gguf", **options).write(out)
    [path] = out.glob("*.gguf")
    return open_gguf(path)


def test_a_file_without_a_trunk_has_what_llama_cpp_asks_for(tiny: Tiny, tmp_path: Path) -> None:
    model = with_tokenizer(tiny("qwen3_5"), tmp_path / "Some-Model")
    found = made(model, tmp_path / "out")
    assert found.folder.name == "mtp-Some-Model.gguf"
    report = inspect(found)
    assert report.head.state == "complete" and report.is_head_alone and not report.warnings
    assert found.value("block_count") == 5 and found.value("nextn_predict_layers") == 1
    values = {name: field.value for name, field in found.fields.items()}
    tokens, kinds = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    assert len(tokens) == len(kinds) == 128 and values["tokenizer.ggml.pre"] == "qwen35"
    assert tokens[3:8] == ["<s>", "<|x|>", "<tool>", "t6", "t7"] and tokens[-1] == "[PAD127]"
    assert kinds[3:8] == [3, 3, 4, 1, 1] and kinds[-1] == 5
    assert values["tokenizer.ggml.merges"] == ["t Ġ2"]
    assert values["tokenizer.ggml.bos_token_id"] == 3 and values["tokenizer.ggml.eos_token_id"] == 7
    assert values["tokenizer.ggml.add_bos_token"] is False
    norm = found.tensors["output_norm.weight"]
    assert (norm.dtype, norm.shape) == ("F32", (256,))
    assert {"token_embd.weight", "output.weight"} <= found.tensors.keys()


def test_such_a_head_comes_back_with_every_bit(tiny: Tiny, tmp_path: Path) -> None:
    model = with_tokenizer(tiny("qwen3_5_moe"), tmp_path / "model")
    made(model, tmp_path / "out")
    again = restore(tiny("qwen3_5_moe", with_head=False), tmp_path / "out", tmp_path / "again")
    assert differing(tensors(again), tensors(tiny("qwen3_5_moe"))) == set()


def test_a_tied_model_has_no_table_of_its_own_for_the_output(tiny: Tiny, tmp_path: Path) -> None:
    model = with_tokenizer(tiny("qwen3_5", tie_word_embeddings=True), tmp_path / "model")
    assert "output.weight" not in made(model, tmp_path / "out").tensors


def test_a_head_that_left_its_model_needs_it_again(tiny: Tiny, tmp_path: Path) -> None:
    model = with_tokenizer(tiny("qwen3_5"), tmp_path / "model")
    plan_export(open_head(model), "headstart").write(tmp_path / "head")
    head = open_head(tmp_path / "head")
    with pytest.raises(ConfigError, match=r"is a head without its model.*--model MODEL"):
        plan_export(head, "gguf")
    plan_convert(head, "gguf", model=open_any(model)).write(tmp_path / "out")
    assert inspect(open_any(tmp_path / "out")).head.state == "complete"


def test_what_is_not_made_is_said(tiny: Tiny, tmp_path: Path) -> None:
    for name, said in (("glm4_moe", "does not draft with it"), ("nemotron_h", "more keys")):
        with pytest.raises(UnsupportedFamily, match=rf"{said}.*--trunk FILE\.gguf"):
            plan_export(open_head(tiny(name)), "gguf")
    with pytest.raises(ConfigError, match=r"is no byte-pair tokenizer \(WordLevel\).*--trunk"):
        plan_export(open_head(tiny("qwen3_5")), "gguf")
    bare = with_tokenizer(tiny("qwen3_5"), tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        plan_export(open_head(bare), "gguf")
    odd = with_tokenizer(tiny("qwen3_5"), tmp_path / "odd")
    document = json.loads((odd / "tokenizer.json").read_text())
    document["model"]["vocab"]["far"] = 128
    (odd / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="gives a token the number 128; expected one below 128"):
        plan_export(open_head(odd), "gguf")
    fields = config_fields(open_head(tiny("step3p5")).config)
    with pytest.raises(BadConfig, match="the config has sliding_window None; expected a whole"):
        step_keys({**fields, "sliding_window": None}, 3)
    with pytest.raises(BadConfig, match="the config has rms_norm_eps x; expected a number"):
        step_keys({**fields, "rms_norm_eps": "x"}, 3)


@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_odd_configs_and_tokenizers_end_in_one_line(data: st.DataObject, whole: Path) -> None:
    odd = st.sampled_from([None, True, -1, 2**70, 0.5, "x", "\ud800", [], ["x"], {"a": 1}])
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        document = json.loads((whole / f"{file}.whole").read_text())
        places = [document, *(v for v in document.values() if isinstance(v, dict))]
        place = data.draw(st.sampled_from(places))
        if place:
            place[data.draw(st.sampled_from(sorted(place)))] = data.draw(odd)
        (whole / file).write_text(json.dumps(document))
    try:
        operation = plan_export(open_head(whole), "gguf")
    except HeadstartError as error:
        assert "\n" not in str(error)
    else:
        [shard] = operation.plan.shards.values()
        assert isinstance(shard, GgufShard) and shard.header()


@pytest.fixture(scope="module")
def whole(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = with_tokenizer(tiny("step3p5"), tmp_path_factory.mktemp("odd") / "model")
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / file, model / f"{file}.whole")
    return model


def test_a_trunk_without_a_norm_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = with_tokenizer(tiny("qwen3_5"), tmp_path / "model")
    kept = {n: v for n, v in tensors(model).items() if not n.endswith("language_model.norm.weight")}
    save_file(kept, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MissingTensor, match="has no final_norm, which a GGUF file with a head"):
        plan_export(open_head(model), "gguf")


IDS = (0, 3, 5, 64, 127)


def vocab_file(out: Path, ids: tuple[int, ...] = IDS) -> Path:
    write([DraftVocab.of(ids, vocab_size=128, name="small")], out)
    return out


def test_a_draft_vocabulary_cuts_the_lm_head_and_is_listed(tiny: Tiny, tmp_path: Path) -> None:
    path = vocab_file(tmp_path / "small.gguf")
    model = with_tokenizer(tiny("qwen3_5"), tmp_path / "model")
    operation = plan_export(open_head(model), "gguf", draft_vocab=str(path))
    assert "29143, which no release holds" in operation.changes[-1]
    operation.write(tmp_path / "out")
    [file] = (tmp_path / "out").glob("*.gguf")
    found = open_gguf(file)
    assert found.tensors["output.weight"].shape == (len(IDS), 256)
    assert found.tensors["token_embd.weight"].shape == (128, 256)
    listed = found.tensors["d2t"]
    assert listed.dtype == "I64" and read(file)[0].ids == IDS  # ids themselves, not offsets
    table = tensors(model)["lm_head.weight"][list(IDS)]
    info = found.tensors["output.weight"]
    assert file.read_bytes()[info.start : info.end] == table.view(torch.uint8).numpy().tobytes()
    assert "draft vocabulary (d2t) of 5 tokens" in " ".join(inspect(found).warnings)


def test_a_tied_head_drafts_from_rows_of_the_embedding(tiny: Tiny, tmp_path: Path) -> None:
    model = with_tokenizer(tiny("qwen3_5", tie_word_embeddings=True), tmp_path / "model")
    found = made(model, tmp_path / "out", draft_vocab=str(vocab_file(tmp_path / "v.json")))
    assert found.tensors["output.weight"].shape == (len(IDS), 256)


def test_draft_vocabularies_that_fit_nothing_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    model = with_tokenizer(tiny("qwen3_5"), tmp_path / "model")
    path = tmp_path / "two.json"
    write([DraftVocab.of((1, 2), name=name, vocab_size=128) for name in "ab"], path)
    with pytest.raises(ConfigError, match=r"holds 2 draft vocabularies \(a, b\).*--only NAME"):
        plan_export(open_head(model), "gguf", draft_vocab=str(path))
    write([DraftVocab.of((1, 200), vocab_size=256)], tmp_path / "other.json")
    with pytest.raises(DataError, match="made for a vocabulary of 256 tokens; the model has 128"):
        plan_export(open_head(model), "gguf", draft_vocab=str(tmp_path / "other.json"))
    with pytest.raises(ConfigError, match=r"cut the trunk's own LM head.*--format gguf"):
        refuse_in_models("v.json")
    glm = arch_of("glm4_moe_lite")
    assert glm is not None
    with pytest.raises(UnsupportedFamily, match="is for qwen35 and qwen35moe"):
        reduced({}, glm, DraftVocab.of(IDS))
    with pytest.raises(ConfigError, match="--draft-vocab belongs to --format gguf"):
        plan_export(open_head(model), "headstart", draft_vocab=str(path))


def test_a_draft_vocabulary_in_gguf_is_read_back(tmp_path: Path) -> None:
    path = vocab_file(tmp_path / "small.gguf")
    [found] = read(path)
    assert (found.ids, found.vocab_size) == (IDS, 128)
    write([found], path, overwrite=True)
    (tmp_path / "none.gguf").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(DataError, match=r"none\.gguf"):
        read(tmp_path / "none.gguf")
