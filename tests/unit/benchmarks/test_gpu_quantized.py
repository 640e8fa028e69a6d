"""The program that compares products with 8- and 4-bit weights, in tiny sizes."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("triton")

import gpu_quantized
import graph_timing
import quantized_ways
from graph_timing import DEVICE
from support.interpreted_bf16 import repair_fp8

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="sizes are those of a GPU there")
FORMS = ("bf16", "row", "int4")


def measured(name: str, **held: list[object]) -> gpu_quantized.Search:
    search = gpu_quantized.Search(time.monotonic() + 60)
    gpu_quantized.measure(search, name, 2, held)
    return search


def test_every_format_is_checked_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    repair_fp8(monkeypatch)
    monkeypatch.setattr(graph_timing, "_LEAST_LAUNCHES", 1)
    monkeypatch.setitem(gpu_quantized.SHAPES, "gate_up", (128, 256))
    held = {form: gpu_quantized.copies_of(form, 128, 256) for form in FORMS}
    search = measured("gate_up", **held)
    assert [row["format"] for row in search.found] == list(FORMS) and not search.wrong
    assert {way[0].split(" ")[0] for way in search.found[1]["ways"]} == {"fused", "then"}
    assert search.found[2]["ways"][0][2] < 0.001


def test_the_best_cuts_are_tried_with_other_groups_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    repair_fp8(monkeypatch)
    monkeypatch.setattr(graph_timing, "_LEAST_LAUNCHES", 1)
    monkeypatch.setitem(gpu_quantized.SHAPES, "down", (64, 128))
    search = measured("down", row=gpu_quantized.copies_of("row", 64, 128))
    assert {way[0].split(" ")[0] for way in search.found[0]["ways"]} == {"r128", "r64", "r0"}


def test_a_wrong_result_is_named_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_ways, "partial_groups", lambda *given: given[1].scales[None] * 0)
    monkeypatch.setattr(gpu_quantized, "error_of", lambda *given: 0.5)
    search = measured("tiny", int4=gpu_quantized.copies_of("int4", 256, 256))
    assert not search.found and "off by 0.5" in search.wrong[0]
