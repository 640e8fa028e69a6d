"""`calibrate --weights`: quantised checkpoints of known acceptance, stored as releases are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import headstart
from support.engine_runs import greedy, run, start
from support.long_runs import one_of_each
from support.quantized_models import VALUES
from support.quantized_tensors import source

from headstart.calibrate.agreement import make_agreement, walk
from headstart.checkpoint.quantized.names import is_scale
from headstart.checkpoint.quantized.reading import quantized_weights
from headstart.checkpoint.quantized.writing import FORMATS, stored_in
from headstart.checkpoint.reader import Checkpoint
from headstart.heads.ignore_lists import is_listed
from headstart.heads.inspection import inspect

SHAPE = "layers=2,hidden=128,intermediate=256,heads=4,kv_heads=2,vocab=64"


def calibrated(weights: str, out: Path) -> dict[str, Any]:
    words = ("--shape", SHAPE, "--acceptance", "0.7", "--weights", weights, "--json")
    result = headstart("calibrate", *words, "--out", str(out))
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("weights", one_of_each(2, FORMATS))
def test_acceptance_is_that_of_the_walk_in_every_format(weights: str, tmp_path: Path) -> None:
    made = calibrated(weights, tmp_path / "out")
    plain = 2 * made["parameters"]
    assert made["bytes"] < 0.8 * plain
    known = make_agreement(64, 128, rate=0.7, seed=0, active=62)
    engine = start(
        tmp_path / "out", speculate=3, dtype="float32", kernels="off", kv_bytes=16_000_000
    )
    kept = "weights are dequantised" if weights in VALUES else "weights stay as stored"
    assert any(kept in note for note in engine.notes)
    for last in (4, 21):
        (result,) = run(engine, [[3, 9, last]], greedy(30))
        found = result.stats.acceptance
        assert [found.drafted, found.accepted] == walk(known, last, 30, 3)


@pytest.mark.parametrize("weights", FORMATS)
def test_the_config_says_what_is_stored_and_lists_what_is_plain(
    weights: str, tmp_path: Path
) -> None:
    calibrated(weights, tmp_path / "out")
    model = Checkpoint.open(tmp_path / "out")
    quantization = model.config.quantization
    stored = [name for name in model.tensors if name.endswith(("qweight", "weight_packed"))] or [
        name for name, info in model.tensors.items() if info.dtype in ("F8_E4M3", "I8")
    ]
    head = [name for name in stored if "mtp" in name]
    assert len(stored) == (21 if weights.startswith("fp8") else 14)
    assert bool(head) == weights.startswith("fp8")
    for name in stored:
        assert not is_listed(quantization, name.rpartition(".")[0]), name
    report = inspect(model)
    assert report.head.state == "complete"
    assert not any("quantis" in pitfall for pitfall in report.warnings)
    plain = {
        name.removesuffix(".weight") for name, info in model.tensors.items()
        if len(info.shape) == 2 and info.dtype == "BF16"
        and "embed" not in name and not is_scale(name)
    }  # fmt: skip
    assert "lm_head" in plain
    unlisted = [module for module in plain if not is_listed(quantization, module)]
    assert unlisted == []


def test_a_format_that_does_not_exist_and_sizes_without_groups(tmp_path: Path) -> None:
    words = ("--shape", SHAPE, "--acceptance", "0.7", "--out", str(tmp_path / "x"))
    result = headstart("calibrate", *words, "--weights", "int3")
    assert result.returncode != 0 and "--weights is 'int3'; expected one of fp8" in result.stderr
    odd = SHAPE.replace("intermediate=256", "intermediate=100")
    result = headstart("calibrate", "--shape", odd, *words[2:], "--weights", "awq")
    assert result.returncode != 0 and "no whole number of groups" in result.stderr
    assert not (tmp_path / "x").exists()


def test_what_is_written_is_the_nearest_that_the_format_has() -> None:
    """Of a plain matrix no value is further away than half a step of its scale."""
    values = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    for name, form in FORMATS.items():
        tensors = stored_in(form, "a", source(values), 32)
        weight = quantized_weights(tensors, form.config(32))["a.weight"]
        error = (weight.values(torch.float32) - values).abs()
        bound = values.abs() / 16 + 1e-3  # half a step of a number with 3 stored bits
        if name in VALUES:  # 4-bit floats: steps of up to 2 below a largest number of 6
            parts = values.view(64, -1, form.groups[0]).abs().amax(-1, keepdim=True)
            # A power of two as scale cuts numbers between 6 and 8 off.
            bound = parts * (0.26 if name == "mxfp4" else 0.19)
            bound = bound.expand(-1, -1, form.groups[0]).reshape(64, -1)
        elif not name.startswith("fp8"):  # AWQ's zero point is rounded, too, as are BF16 scales
            weight_groups = weight.quantized()
            steps = weight_groups.scales.float().repeat_interleave(weight_groups.group_size, 1)
            bound = steps * (1.01 if name == "awq" else 0.55)
        assert (error <= bound).all() and error.max() > bound.max() / 4, name
