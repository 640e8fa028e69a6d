"""`headstart quantize`: a smaller head that every command takes, scored before and after."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from support import distill_runs
from support.commands import headstart
from support.engine_runs import (
    assert_head_is_alive,
    checkpoint,
    greedy,
    ids_of,
    make_prompts,
    run,
    start,
)
from support.head_edits import config, differing, export, head_names, stitch, tensors
from support.long_runs import one_of_each, unless_long
from support.quantized_models import quantized_model
from support.swapped_heads import acceptance
from support.tiny_fixture import Tiny

from headstart.checkpoint.reader import Checkpoint
from headstart.errors import CheckpointError
from headstart.heads.formats import open_head
from headstart.heads.inspection import inspect
from headstart.models.build import build
from headstart.models.linear import Linear
from headstart.models.quantized import Fp8Linear, GroupLinear
from headstart.quantize import plan
from headstart.quantize.rounding import rounded
from headstart.simulate.answers import Batch
from headstart.train.frozen_model import load_frozen_model

BITS = ("4", "8", "fp8")
KINDS = {"4": GroupLinear, "8": GroupLinear, "fp8": Fp8Linear}
FORMATS = {"4": "pack-quantized", "8": "int-quantized", "fp8": "float-quantized"}
PLAIN = {"dtype": "float32", "kernels": "off"}
Made = Callable[..., Path]


@pytest.fixture(scope="module")
def asked(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model`, and answers of it in `data`."""
    return ask(checkpoint(tiny), tmp_path_factory.mktemp("asked"))


def ask(plain: Path, folder: Path) -> Path:
    model = folder / "model"
    shutil.copytree(plain, model)
    (model / "chat_template.jinja").write_text(distill_runs.TEMPLATE)
    ends = {"eos_token_id": [1, 10, 20, 30, 40]}
    (model / "generation_config.json").write_text(json.dumps(ends))
    prompts = distill_runs.write_prompts(folder / "prompts.jsonl", 24)
    # Noise that draft and trunk share would make a worthless head agree half of the time.
    distill_runs.run(model, prompts, folder / "data", engine=PLAIN, temperature=0.0)
    return folder


def quantize(asked: Path, bits: str, out: Path, *more: str, model: str = "model") -> dict[str, Any]:
    words = ("--data", str(asked / "data"), "--bits", bits, "--max-loss", "0.3", "--json")
    with mock.patch.object(os, "fsync"):
        result = headstart("quantize", str(asked / model), *words, "--out", str(out), *more)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def made(asked: Path) -> Made:
    """`made("4")`: the head in so many bits, as a folder."""

    def get(bits: str) -> Path:
        out = asked / f"head-{bits}"
        if not out.exists():
            (asked / f"{bits}.json").write_text(json.dumps(quantize(asked, bits, out)))
        return out

    return get


@pytest.mark.parametrize("bits", BITS)
def test_a_head_and_an_lm_head_for_drafts_are_written_and_measured(
    bits: str, made: Made, asked: Path
) -> None:
    head, model = made(bits), asked / "model"
    said = json.loads((asked / f"{bits}.json").read_text())
    lengths = [said["acceptance"][when]["walked"] for when in ("before", "after")]
    assert said["loss"] == pytest.approx(
        1 - lengths[1]["acceptance_length"][3] / lengths[0]["acceptance_length"][3]
    )
    assert 1.2 < lengths[0]["acceptance_length"][3] < 3.7, "the head proves something"
    assert said["size_bytes"]["quantized_head"] < 0.75 * said["size_bytes"]["head"]
    # `score` finds what was said, from the files alone.
    words = ("--data", str(asked / "data"), "--head", str(head), "--max-drafts", "3")
    scored = headstart("score", str(model), *words, "--bandwidth", "100", "--json")
    assert scored.returncode == 0, scored.stderr
    overall = json.loads(scored.stdout)["results"][0]["overall"]["walked"]
    assert overall["counters"] == lengths[1]["counters"]
    stored = Checkpoint.open(head)
    assert stored.config.quantization["format"] == FORMATS[bits]
    assert json.loads((head / "headstart.json").read_text())["quantize"]["bits"] == bits
    built = build(Checkpoint.open(model), head, device="cpu", dtype="float32")
    assert built.head is not None
    own = built.head.modules_[0]
    assert [type(part) for part in (own.lm_head, own.block.mlp.down, own.fuse)] == [
        KINDS[bits], KINDS[bits], Linear,
    ]  # fmt: skip
    assert any("drafts go through an LM head of their own, as stored" in n for n in built.notes)


ENGINES = [(bits, kernels) for bits in BITS for kernels in ("auto", "off")]


@pytest.mark.parametrize(
    ("bits", "kernels"), unless_long([("4", "auto"), ("8", "off"), ("fp8", "off")], ENGINES)
)
def test_the_engine_drafts_with_it_and_writes_the_same_text(
    bits: str, kernels: str, made: Made, asked: Path
) -> None:
    model = asked / "model"
    wanted = ids_of(run(start(model, speculate=0, **PLAIN), make_prompts(), greedy()))
    settings = {"dtype": "float32", "kernels": kernels, "head": made(bits)}
    engine = start(model, speculate=3, **settings)
    results = run(engine, make_prompts(), greedy())
    assert_head_is_alive(results)
    assert ids_of(results) == wanted
    # The control: a damaged copy of the LM head drafts otherwise.
    assert engine.model.head is not None and engine.model.head.own_lm_heads
    if kernels == "off":
        with torch.no_grad():
            engine.model.head.own_lm_heads[0].scales.zero_()
        again = run(engine, make_prompts(), greedy())
        assert ids_of(again) == wanted
        assert sum(r.stats.acceptance.accepted[0] for r in again) < sum(
            r.stats.acceptance.accepted[0] for r in results
        )


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("bits", unless_long(["4"], ["4", "8", "fp8"]))
def test_kernels_of_a_gpu_draft_with_it(
    bits: str, made: Made, asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interpreted, and so a few tokens only."""
    pytest.importorskip("triton")
    from support.interpreted_bf16 import repair_fp8

    from headstart.backends.cuda.kernel_linear import KernelLinear

    repair_fp8(monkeypatch)
    settings = {"dtype": "float32", "kernels": "on", "max_model_len": 32, "kv_bytes": 1 << 18}
    engine = start(asked / "model", speculate=2, head=made(bits), **settings)
    head = engine.model.head
    assert head is not None
    kept = [module for module in head.modules() if isinstance(module, KernelLinear)]
    assert len(kept) == 5 and head.own_lm_heads[0] in kept
    prompt = [[33, 11, 60]]
    (found,) = ids_of(engine.generate(prompt, [greedy(8)]))
    wanted = ids_of(run(start(asked / "model", speculate=0, **PLAIN), prompt, greedy(8)))
    assert [found] == wanted
    assert sum(engine.stats.acceptance.accepted) > 0


def test_a_head_in_4_bits_stays_so_beside_a_trunk_in_8(made: Made, asked: Path) -> None:
    engine = start(
        asked / "model", speculate=3, dtype="float32", kernels="off", weights="int8",
        head=made("4"),
    )  # fmt: skip
    head = engine.model.head
    assert head is not None
    kept = [module for module in head.modules() if isinstance(module, GroupLinear)]
    assert len(kept) == 5  # qkv, o, gate and up, down, and the LM head for drafts
    assert_head_is_alive(run(engine, make_prompts(), greedy()))


@pytest.mark.parametrize("bits", BITS)
def test_it_is_put_into_a_model_that_is_not_quantised(
    bits: str, made: Made, asked: Path, tmp_path: Path
) -> None:
    """vLLM asks for MiMo's head as layers behind the trunk's, SGLang by another name."""
    model = asked / "model"
    whole = stitch(made(bits), model, tmp_path / "whole")
    quantization = config(whole)["quantization_config"]
    (group,) = quantization["config_groups"].values()
    layers = config(whole)["num_hidden_layers"]
    for name in (f"model.layers.{layers}.self_attn.qkv_proj", "model.mtp_layers.0.mlp.down_proj"):
        assert name in group["targets"]
    assert "draft.lm_head" not in group["targets"] and "Linear" not in group["targets"]
    assert {"lm_head", "model.mtp_layers.0.input_proj"} <= set(quantization["ignore"])
    trunk = set(tensors(model)) - set(head_names(model).values())
    assert differing({n: tensors(model)[n] for n in trunk}, {
        n: tensors(whole)[n] for n in trunk
    }) == set()  # fmt: skip
    report = inspect(Checkpoint.open(whole))
    assert report.head.state == "complete" and report.head.is_quantized
    assert report.trunk.quantization == ""
    assert not [text for text in report.warnings if "quantis" in text or "exclude" in text]
    engine = start(whole, speculate=3, **PLAIN)
    assert engine.model.head is not None
    assert isinstance(engine.model.head.modules_[0].block.mlp.down, KINDS[bits])
    results = run(engine, make_prompts(), greedy())
    assert_head_is_alive(results)
    again = export(whole, "headstart", tmp_path / "again")
    weights = {n: t for n, t in tensors(made(bits)).items() if not n.startswith("draft.")}
    assert differing(tensors(again), weights) == set()
    # Through a format without a place for the config of a head, its values are kept.
    plain = stitch(made(bits), model, tmp_path / "plain", dequantized=True)
    assert "quantization_config" not in config(plain)
    dequantized = run(start(plain, speculate=3, **PLAIN), make_prompts(), greedy())
    assert ids_of(dequantized) == ids_of(results)


@pytest.mark.parametrize("form", one_of_each(2, ["fp8-row", "compressed-tensors", "int8-row"]))
def test_it_is_put_into_a_model_of_compressed_tensors_with_other_numbers(
    form: str, made: Made, asked: Path, tiny: Tiny, tmp_path: Path
) -> None:
    model = quantized_model(tiny, form)
    whole = stitch(made("8" if form == "fp8-row" else "fp8"), model, tmp_path / "whole")
    quantization = config(whole)["quantization_config"]
    assert quantization["format"] == "mixed-precision"
    assert list(quantization["config_groups"]) == ["head_0", "group_0"]
    assert not inspect(Checkpoint.open(whole)).warnings
    results = run(start(whole, speculate=3, **PLAIN), make_prompts(), greedy())
    assert_head_is_alive(results)
    # Its own format needs no group more.
    same = {"fp8-row": "fp8", "int8-row": "8"}.get(form)
    if same is not None:
        whole = stitch(made(same), model, tmp_path / "same")
        assert list(config(whole)["quantization_config"]["config_groups"]) == ["group_0"]
    with pytest.raises(CheckpointError, match=r"has quantisation 'awq'.*Add --dequantize"):
        stitch(made("4"), quantized_model(tiny, "awq"), tmp_path / "refused")


@pytest.mark.parametrize(
    ("family", "bits"),
    unless_long([("glm4_moe", "4")], [(f, b) for f in ("glm4_moe", "deepseek_v3") for b in BITS]),
)
def test_experts_and_latent_attention(family: str, bits: str, tiny: Tiny, tmp_path: Path) -> None:
    """Experts get one tensor each, and those that quantised releases leave plain stay so."""
    sizes = {"moe_intermediate_size": 64}
    if family == "deepseek_v3":
        sizes |= {"kv_lora_rank": 64, "v_head_dim": 32}
    folder = ask(checkpoint(tiny, family, **sizes), tmp_path)
    said = quantize(folder, bits, tmp_path / "head", "--dtype", "float32")
    assert any("rounded to nearest" in change for change in said["changes"])  # inputs of `down`
    own = tensors(tmp_path / "head")
    stored = "weight_packed" if bits == "4" else "weight_scale"
    assert f"modules.0.block.mlp.experts.1.down_proj.{stored}" in own
    assert not [n for n in own if "mlp.gate." in n and n.endswith(stored)]  # the router
    whole = stitch(tmp_path / "head", folder / "model", tmp_path / "whole")
    results = run(start(whole, speculate=3, **PLAIN), make_prompts(), greedy())
    assert_head_is_alive(results)
    plain = run(start(folder / "model", speculate=0, **PLAIN), make_prompts(), greedy())
    assert ids_of(results) == ids_of(plain)


def test_other_formats_of_heads_carry_it_or_dequantise_it(
    made: Made, asked: Path, tmp_path: Path
) -> None:
    head = made("4")
    sglang = tmp_path / "sglang"
    result = headstart("convert", str(head), "--to", "sglang", "--out", str(sglang))
    assert result.returncode == 0 and "LM head for drafts is left out" in result.stdout
    quantization = config(sglang)["quantization_config"]
    assert quantization["format"] == "pack-quantized"
    (group,) = quantization["config_groups"].values()
    assert "self_attn.qkv_proj" in group["targets"] and "draft.lm_head" not in group["targets"]
    back = open_head(sglang)
    assert back.is_quantized and back.quantization == open_head(head).quantization
    xllm = tmp_path / "xllm"
    words = ("convert", str(head), "--to", "xllm", "--model", str(asked / "model"))
    result = headstart(*words, "--out", str(xllm))
    assert result.returncode == 0, result.stderr
    assert not open_head(xllm).is_quantized and not open_head(xllm).quantization


def test_training_goes_on_from_it_unquantised(made: Made, asked: Path) -> None:
    frozen = load_frozen_model(
        Checkpoint.open(asked / "model"), made("4"), device="cpu", dtype="float32"
    )
    assert not frozen.source.is_quantized and not frozen.source.quantization
    assert frozen.built.head is not None and not frozen.built.head.own_lm_heads
    assert all(p.dtype == torch.float32 for p in frozen.master().parameters())


def test_a_loss_that_is_not_allowed_is_refused_and_nothing_is_written(
    asked: Path, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["quantize", str(asked / "model"), "--data", str(asked / "data"), "--bits", "4"]
    out = tmp_path / "out"
    held: list[str] = []

    def on(batch: Batch, device: Any) -> Batch:
        held.append(str(device))
        return batch

    with monkeypatch.context() as patch:  # rows of another matrix: a head that is worth less
        patch.setattr(Batch, "on", on)
        patch.setattr(plan, "rounded", lambda values, *more: rounded(values.flip(0), *more))
        result = headstart(*words, "--out", str(out))
    assert result.returncode == 1 and "--max-loss allows 3 %" in result.stderr
    assert "--no-lm-head" in result.stderr and not list(tmp_path.iterdir())
    assert held and held[0] == "cpu"  # states of all answers are not kept on a GPU
    result = headstart(*words, "--max-loss", "0.3", "--out", str(out), "--dry-run", "--no-lm-head")
    assert result.returncode == 0 and "acceptance" in result.stdout, result.stderr
    assert "LM head for drafts" not in result.stdout and not list(tmp_path.iterdir())
    result = headstart(*words, "--max-loss", "0.3", "--out", str(made("4")))
    assert result.returncode == 1 and "exists" in result.stderr
    result = headstart(*words, "--head", str(made("4")), "--out", str(out))
    assert result.returncode == 1 and "is quantised already" in result.stderr
    result = headstart(*words, "--head", str(made("4")), "--out", str(made("4") / "sub"))
    assert result.returncode == 1 and "overlaps the input" in result.stderr
    result = headstart(*words, "--max-loss", "3", "--out", str(out))
    assert result.returncode == 2 and "share from 0 to 1" in result.stderr
    assert not list(tmp_path.iterdir())


def test_an_lm_head_of_another_size_is_refused(made: Made, asked: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    damaged = tmp_path / "damaged"
    shutil.copytree(made("8"), damaged)
    own = tensors(damaged)
    own["draft.lm_head.weight"] = own["draft.lm_head.weight"][:-1].contiguous()
    own["draft.lm_head.weight_scale"] = own["draft.lm_head.weight_scale"][:-1].contiguous()
    save_file(own, damaged / "head.safetensors")
    result = headstart("generate", str(asked / "model"), "t3", "--head", str(damaged))
    assert result.returncode == 1 and "Quantise the head with this model" in result.stderr


@pytest.mark.parametrize(
    ("bits", "kernels"), unless_long([("4", "auto"), ("8", "auto"), ("fp8", "off")], ENGINES)
)
def test_a_running_head_is_swapped_for_another_that_is_quantised_alike(
    bits: str, kernels: str, made: Made, asked: Path, tmp_path: Path
) -> None:
    """Its matrices, its LM head for drafts, and the rows of that for a draft vocabulary."""
    good = made(bits)
    other = Path(shutil.copytree(good, tmp_path / "other"))
    file = next(other.glob("*.safetensors"))
    own = tensors(other)
    for name in [name for name in own if name.endswith("weight_scale")]:
        own[name] = own[name].flip(0).contiguous()
    save_file(own, file, metadata={"format": "pt"})
    settings: dict[str, Any] = {
        **PLAIN, "kernels": kernels, "speculate": 3, "draft_vocab": list(range(0, 64, 2)),
    }  # fmt: skip
    engine, fresh = (start(asked / "model", head=head, **settings) for head in (other, good))
    params = [greedy(16, draft_vocab=name) for name in ("none", "default")] * 4
    weak, wanted = (acceptance(own, make_prompts()[:8], params) for own in (engine, fresh))
    assert weak != wanted
    engine.swap_head(good)
    assert acceptance(engine, make_prompts()[:8], params) == wanted
    plain = export(asked / "model", "headstart", tmp_path / "plain")
    with pytest.raises(CheckpointError, match="stored in another format"):
        engine.swap_head(plain)
    assert acceptance(engine, make_prompts()[:8], params) == wanted
