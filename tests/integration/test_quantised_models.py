"""Quantised checkpoints run as they are stored: the same text as dequantised, with and without
drafts, and everything that runs a model runs them.

Formats take turns over what is done alike with all of them; long runs try every pair.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from support import distill_runs, training_runs
from support.commands import headstart
from support.engine_runs import (
    assert_head_is_alive,
    greedy,
    ids_of,
    make_prompts,
    run,
    seeded,
    start,
)
from support.head_edits import config, differing, edited, export, restore, stitch, tensors
from support.long_runs import IS_LONG, one_of_each, unless_long
from support.quantized_models import (
    ALL,
    VALUES,
    plain_model,
    quantized_model,
    with_quantized_lm_head,
)
from support.tiny_fixture import Tiny
from support.training_data import random_records, write_data

from headstart.backends.weights import TAKEN_FORMS
from headstart.checkpoint.quantized.writing import FORMATS as WRITTEN
from headstart.checkpoint.reader import Checkpoint
from headstart.models.build import Held, build
from headstart.models.documents import Documents, Passage
from headstart.models.quantized import Fp8Linear, Fp8Stack, GroupLinear, GroupStack
from headstart.server.app import create_app
from headstart.server.options import ServerOptions
from headstart.server.state import ServerState

# Sizes at which the parts of merged matrices end with blocks of 128.
BLOCKS: dict[str, Any] = {"head_dim": 64, "intermediate_size": 128}
AS_STORED = {"dtype": "float32", "kernels": "off"}
FORMATS = [form for form in ALL if form not in VALUES]
WAYS = ("greedy", "seeded")
FEW = make_prompts(4)


def logits(folder: Path, dtype: str = "float32", **options: Any) -> torch.Tensor:
    """The trunk's logits for a text."""
    model = build(Checkpoint.open(folder), device="cpu", dtype=dtype, with_head=False, **options)
    ids, documents = torch.arange(2, 40), Documents((38,))
    contexts = [Passage(documents) for _ in model.trunk.layers]
    with torch.inference_mode():
        states = model.trunk(ids, documents.positions(ids.device), contexts)
        return model.trunk.logits(model.trunk.final_norm(states))


# Usually every third format, greedy and seeded in turn.
IN_TURN = [(form, WAYS[place % 2]) for place, form in enumerate(ALL[1::3])]


@pytest.mark.parametrize(
    ("form", "way"), unless_long(IN_TURN, [(form, way) for form in ALL for way in WAYS])
)
def test_drafts_change_no_text(form: str, way: str, tiny: Tiny) -> None:
    folder = quantized_model(tiny, form)
    params = greedy() if way == "greedy" else seeded(temperature=0.8)
    found = []
    for drafts in (0, 1, 2, 3, 4):
        results = run(start(folder, speculate=drafts, **AS_STORED), make_prompts(), params)
        found.append(ids_of(results))
        if drafts == 4:
            assert_head_is_alive(results)
    assert all(ids == found[0] for ids in found[1:])


@pytest.mark.parametrize("form", [form for form in ALL if form not in dict(IN_TURN)])
def test_every_other_format_runs_with_drafts_and_without(form: str, tiny: Tiny) -> None:
    """Shorter, for those whose turn it is not; all but those read as values stay as stored."""
    found = []
    for drafts in (0, 3):
        engine = start(quantized_model(tiny, form), speculate=drafts, **AS_STORED)
        results = run(engine, FEW, greedy(12))
        found.append(ids_of(results))
        assert any("stay as stored" in note for note in engine.notes) == (form not in VALUES)
    assert_head_is_alive(results)
    assert found[0] == found[1]


@pytest.mark.parametrize("form", one_of_each(2, FORMATS))
def test_weights_stay_as_stored_and_compute_what_dequantised_ones_do(form: str, tiny: Tiny) -> None:
    folder = quantized_model(tiny, form, **BLOCKS)
    model = build(Checkpoint.open(folder), device="cpu", dtype="float32")
    kinds = {
        type(layer) for block in model.trunk.layers for layer in (
            block.attention.qkv, block.attention.o, block.mlp.gate_up, block.mlp.down)
    }  # fmt: skip
    assert kinds == {Fp8Linear if form.startswith("fp8") else GroupLinear}
    assert any(note.startswith("14 weights stay as stored: ") for note in model.notes)
    held = sum(
        tensor.numel() * tensor.itemsize
        for name, tensor in model.trunk.layers.state_dict().items() if "norm" not in name
    )  # fmt: skip
    stored = sum(
        info.end - info.start for name, info in Checkpoint.open(folder).tensors.items()
        if "model.layers." in name and "norm" not in name
    )  # fmt: skip
    assert held <= 1.05 * stored
    as_stored = logits(folder)
    dequantized = logits(folder, holds=lambda model: Held(why_not="tests"))
    exact = logits(folder, "float64")
    torch.testing.assert_close(as_stored, dequantized, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(as_stored.double(), exact, rtol=1e-4, atol=1e-4)
    # The control: quantising has changed the model.
    plain = logits(plain_model(tiny, **BLOCKS))
    assert (plain - as_stored).abs().max() > 10 * (as_stored.double() - exact).abs().max()


def test_what_runs_dequantised_says_so_and_what_it_costs(tiny: Tiny) -> None:
    folder = quantized_model(tiny, "awq")
    for options, why in (
        ({"dtype": "float64"}, "numbers are float64"),
        ({"dtype": "float32", "exact": True}, "exact computes with weights in"),
        ({"dtype": "float32", "kernels": "off", "weights": "int8"}, "weights int8 were asked for"),
    ):
        notes = [note for note in start(folder, **options).notes if "dequantised" in note]
        assert len(notes) == 1 and why in notes[0] and " in place of " in notes[0]
    notes = start(quantized_model(tiny, "nvfp4"), **AS_STORED).notes
    assert any("(NVFP4): no backend computes with this format" in note for note in notes)
    assert not any("dequantised" in note for note in start(folder, **AS_STORED).notes)


def test_a_backend_that_takes_nothing_gets_dequantised_weights(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TAKEN_FORMS, "torch", ("fp8-row",))
    engine = start(quantized_model(tiny, "awq"), **AS_STORED)
    assert any("backend torch does not compute with this" in note for note in engine.notes)
    assert not any(isinstance(m, GroupLinear) for m in engine.model.trunk.modules())


@pytest.mark.parametrize(
    ("family", "form"),
    one_of_each(
        3, [(m, f) for m in ("deepseek_v3", "glm4_moe") for f in ("fp8-block", "awq", "fp8-row")]
    ),
)  # fmt: skip
def test_experts_stay_as_stored(family: str, form: str, tiny: Tiny) -> None:
    sizes = {"moe_intermediate_size": 128}
    if family == "deepseek_v3":  # groups of 32 in every row
        sizes |= {"kv_lora_rank": 64, "v_head_dim": 32, "q_lora_rank": 32}
    folder = quantized_model(tiny, form, family, **sizes)
    built = build(Checkpoint.open(folder), device="cpu", dtype="float32")
    stack = Fp8Stack if form.startswith("fp8") else GroupStack
    assert sum(isinstance(module, stack) for module in built.trunk.modules()) == 2
    engine = start(folder, speculate=3, **AS_STORED)
    assert not any("dequantised" in note and "expert" in note for note in engine.notes)
    results = run(engine, make_prompts(), greedy())
    assert ids_of(results) == ids_of(run(start(folder, speculate=0), make_prompts(), greedy()))


def test_parts_in_different_formats_are_dequantised_together(tiny: Tiny, tmp_path: Path) -> None:
    """A merged matrix of which one part is plain, as ignore lists make them."""
    name = "model.layers.0.self_attn.k_proj"
    plain = tensors(plain_model(tiny))[f"{name}.weight"]

    def change(own: dict[str, torch.Tensor]) -> None:
        for suffix in ("qweight", "qzeros", "scales"):
            own.pop(f"{name}.{suffix}")
        own[f"{name}.weight"] = plain

    folder = edited(quantized_model(tiny, "awq"), tmp_path / "mixed", change=change)
    engine = start(folder, **AS_STORED)
    kinds = [type(block.attention.qkv).__name__ for block in engine.model.trunk.layers]
    assert kinds == ["Linear", "GroupLinear"]
    assert any("merged with parts that are not quantised" in note for note in engine.notes)


@pytest.mark.parametrize(
    "form", unless_long(["fp8-row", "awq"], [form for form in FORMATS if form in WRITTEN])
)
def test_a_quantised_lm_head_runs_as_it_is_stored(form: str, tiny: Tiny) -> None:
    folder = with_quantized_lm_head(tiny, form, **BLOCKS)
    params = [greedy(), seeded(temperature=0.8)] * 2
    for kernels in ("off", "auto"):
        texts = []
        for drafts, vocab in ((0, None), (3, list(range(0, 64, 2))), (3, None)):
            options = {"dtype": "float32", "kernels": kernels, "draft_vocab": vocab}
            engine = start(folder, speculate=drafts, **options)
            results = run(engine, FEW, params)
            texts.append(ids_of(results))
        assert_head_is_alive(results)
        assert texts[1:] == texts[:1] * 2
        if kernels == "off":
            kind = type(engine.model.trunk.lm_head)
            assert kind == (Fp8Linear if form.startswith("fp8") else GroupLinear)
            assert not any("dequantised" in note for note in engine.notes)
    as_stored = logits(folder)
    dequantized = logits(folder, holds=lambda model: Held(why_not="tests"))
    torch.testing.assert_close(as_stored, dequantized, rtol=1e-4, atol=1e-4)
    # The control: it is not the plain one.
    plain = logits(quantized_model(tiny, form, **BLOCKS))
    assert (plain - as_stored).abs().max() > 10 * (dequantized - as_stored).abs().max()


# Heads


@pytest.mark.parametrize("form", unless_long(["fp8-block", "gptq", "fp8-static"], ALL))
def test_a_lost_head_is_restored_into_a_quantised_model(
    form: str, tiny: Tiny, tmp_path: Path
) -> None:
    """A BF16 head in a quantised trunk drafts what it drafted before."""
    whole = quantized_model(tiny, form)
    lost = edited(
        whole, tmp_path / "lost",
        change=lambda own: [own.pop(name) for name in list(own) if "mtp" in name],
    )  # fmt: skip
    again = restore(lost, plain_model(tiny), tmp_path / "again")
    assert config(again)["quantization_config"]["quant_method"]
    results = run(start(again, speculate=3, **AS_STORED), FEW, greedy())
    assert_head_is_alive(results)
    assert ids_of(results) == ids_of(run(start(lost, **AS_STORED), FEW, greedy()))


@pytest.mark.parametrize("form", unless_long(["fp8-row", "awq", "fp8-static"], ALL))
def test_a_changed_head_is_stitched_into_a_quantised_model(
    form: str, tiny: Tiny, tmp_path: Path
) -> None:
    """In the place of a plain or a quantised one it drafts as it does beside the model."""

    def silence(own: dict[str, torch.Tensor]) -> None:
        for name in own:
            if "mtp" in name and name.endswith("down_proj.weight"):
                own[name].zero_()

    changed = edited(plain_model(tiny), tmp_path / "changed", change=silence)
    head = export(changed, "headstart", tmp_path / "head")
    whole = quantized_model(tiny, form)
    stitched = stitch(head, whole, tmp_path / "stitched")
    found, beside, before = (
        run(start(model, speculate=3, head=own, **AS_STORED), FEW, greedy())
        for model, own in ((stitched, None), (whole, head), (whole, None))
    )
    assert_head_is_alive(found)
    assert ids_of(found) == ids_of(before)
    origins = [[output.origins for output in results[0].outputs + results[1].outputs]
               for results in (found, beside, before)]  # fmt: skip
    assert origins[0] == origins[1]
    assert origins[0] != origins[2], "the control: the head that was there drafts otherwise"


@pytest.mark.parametrize("form", one_of_each(2, ["fp8-block", "fp8-row"]))
def test_a_quantised_head_drafts_in_a_plain_trunk(form: str, tiny: Tiny, tmp_path: Path) -> None:
    head = export(quantized_model(tiny, form, **BLOCKS), "headstart", tmp_path / "head")
    plain = plain_model(tiny, **BLOCKS)
    engine = start(plain, speculate=3, head=head, **AS_STORED)
    assert engine.model.head is not None
    assert isinstance(engine.model.head.modules_[0].block.mlp.down, Fp8Linear)
    results = run(engine, make_prompts(), greedy())
    assert_head_is_alive(results)
    assert ids_of(results) == ids_of(run(start(plain, **AS_STORED), make_prompts(), greedy()))
    stitched = stitch(head, plain, tmp_path / "one", dequantized=True)
    again = run(start(stitched, speculate=3, **AS_STORED), make_prompts(), greedy())
    assert ids_of(again) == ids_of(results)


# Everything else that runs a model


@pytest.mark.parametrize("form", unless_long(["awq"], ["awq", "fp8-block", "gptq-sorted"]))
def test_distilling_training_scoring_and_probing(form: str, tiny: Tiny, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(quantized_model(tiny, form), model)
    (model / "chat_template.jinja").write_text(distill_runs.TEMPLATE)
    ends = {"eos_token_id": [1, 10, 20, 30, 40]}
    (model / "generation_config.json").write_text(json.dumps(ends))
    prompts = distill_runs.write_prompts(tmp_path / "prompts.jsonl")
    engine = {"dtype": "float32", "kernels": "off"}
    distill_runs.run(model, prompts, tmp_path / "data", engine=engine)
    before = tensors(model)
    outcome = training_runs.trained(tmp_path, tmp_path / "run", dtype="float32", device="cpu")
    assert outcome.is_finished and outcome.step == outcome.num_steps
    head = tmp_path / "run" / "head"
    assert all(value.dtype in (torch.bfloat16, torch.float32) for value in tensors(head).values())
    assert differing(before, tensors(model)) == set()
    words = (str(model), "--data", str(tmp_path / "data"), "--head", str(head))
    result = headstart("score", *words, "--bandwidth", "100", "--dtype", "float32")
    assert result.returncode == 0 and "best K: " in result.stdout, result.stderr
    probed = headstart("inspect", str(model), "--probe", "--device", "cpu", "--dtype", "float32")
    assert probed.returncode == 0, probed.stderr
    said = headstart("generate", str(model), "t3 t9", "--head", str(head), "--device", "cpu")
    assert said.returncode == 0, said.stderr


@pytest.mark.parametrize("form", unless_long(["awq"], ["awq", "fp8-block", "int8-row"]))
def test_a_head_is_trained_over_a_quantised_lm_head(form: str, tiny: Tiny, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(with_quantized_lm_head(tiny, form, **BLOCKS), model)
    heldout = random_records(4, vocab=64, seed=9, prefix="h")
    write_data(model, tmp_path / "data", random_records(16, vocab=64), heldout)
    before = tensors(model)
    assert {"lm_head.qweight", "lm_head.weight_scale", "lm_head.weight_scale_inv"} & set(before)
    options = {"dtype": "float32", "device": "cpu", "epochs": 1}
    outcome = training_runs.trained(tmp_path, tmp_path / "run", **options)
    assert outcome.is_finished and outcome.step == outcome.num_steps > 2
    losses = [line["loss"] for line in training_runs.metrics(tmp_path / "run") if "loss" in line]
    assert losses and all(math.isfinite(loss) for loss in losses)
    assert differing(before, tensors(model)) == set()
    head = tensors(tmp_path / "run" / "head")
    assert head and not any("lm_head" in name for name in head)
    assert all(value.dtype in (torch.bfloat16, torch.float32) for value in head.values())


def test_a_quantised_model_answers_over_http(tiny: Tiny) -> None:
    """In this process, with drafts; the text is the engine's without any."""
    folder, asked = quantized_model(tiny, "awq"), {"max_tokens": 16, "temperature": 0}
    prompt = [5, 9, 33]
    (alone,) = run(start(folder, speculate=0, dtype="float32"), [prompt], greedy(16))
    state = ServerState(
        "tiny", ServerOptions(port=0), lambda: start(folder, speculate=3, dtype="float32"),
        is_public=False,
    )  # fmt: skip

    async def ask() -> dict[str, Any]:
        is_ready = asyncio.Event()
        state.worker.start(is_ready.set)
        await is_ready.wait()
        state.gate.is_open = True
        transport = httpx.ASGITransport(create_app(state))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            body = {"prompt": prompt, "ignore_eos": True, "return_token_ids": True, **asked}
            answer = await http.post("/v1/completions", json=body)
        await asyncio.to_thread(state.worker.stop, 10)
        state.close()
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    (choice,) = asyncio.run(ask())["choices"]
    assert choice["token_ids"] == alone.outputs[0].token_ids
    assert choice["text"]


@pytest.mark.skipif(not IS_LONG, reason="bench starts servers in processes of their own")
def test_a_server_and_bench_run_a_quantised_model(tiny: Tiny) -> None:
    load = ("--num-requests", "2", "--input-tokens", "4", "--output-tokens", "6", "--repeats", "1")
    model = quantized_model(tiny, "compressed-tensors")
    result = headstart("bench", "run", str(model), *load, "--warm-up", "0", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["cells"]
