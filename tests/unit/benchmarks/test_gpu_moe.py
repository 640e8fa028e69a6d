"""The benchmark of experts runs without a GPU, and refuses a sort that is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from support.long_runs import long_only

pytest.importorskip("triton")

import gpu_moe
from graph_timing import DEVICE, seconds_over
from moe_layers import FLOPS, floor_of

from headstart.backends.cuda.kernels import moe
from headstart.backends.cuda.kernels.sorting import sort_plainly

pytestmark = pytest.mark.usefixtures("quick_kernels")
WAYS = {"kernel 64", "plain"}


@long_only
def test_everything_is_timed_and_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_moe, "SORT_STEPS", (64,))
    options = "--shape tiny --rows 2 --scanned 4 --sort-rows 6"
    monkeypatch.setattr("sys.argv", ["gpu_moe.py", *options.split()])
    usual = moe.MAX_SCANNED_ROWS, moe.sort_pairs
    gpu_moe.main()
    assert (moe.MAX_SCANNED_ROWS, moe.sort_pairs) == usual
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["rows"] for row in told["rows"]] == [2]
    (found,) = told["sorts"]
    assert found["rows"] == 6 and set(found["sort_us"]) == set(found["layer_us"]) == WAYS
    assert min(found["sort_us"].values()) > 0


@long_only
def test_both_ways_of_few_rows_are_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--shape tiny --experts 6 --rows 2,5 --ways"
    monkeypatch.setattr("sys.argv", ["gpu_moe.py", *options.split()])
    gpu_moe.main()
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["shape"], told["num_experts"]) == ("tiny", 6)
    assert [(one["rows"], one["chosen"]) for one in told["ways"]] == [(2, "vector"), (5, "tiles")]
    for one in told["ways"]:
        assert one["vector_to_tiles"] == pytest.approx(one["vector_us"] / one["tiles_us"])
        assert one["choices"] == 3 * one["rows"] >= one["experts"] > 3


@long_only
def test_tiles_of_both_sizes_are_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_moe.py", "--shape", "tiny", "--rows", "70", "--tiles"])
    gpu_moe.main()
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["tiles"]
    assert row["rows"] == 70 and set(row["us"]) == {"64", "128"}


def test_a_floor_is_of_bytes_for_few_rows_and_of_products_for_many() -> None:
    layer = gpu_moe.LAYERS["deepseek-v3"]
    each = 3 * 7168 * 2048 * 2
    assert floor_of(layer, 1, 9 * each, 4e12) == 9 * each / 4e12
    products = 2 * 8192 * 7168 * (3 * 9 * 2048 + 256)
    assert floor_of(layer, 8192, 257 * each, 4e12) == products / FLOPS


def test_rows_that_are_not_sorted_are_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_moe.py", "--sort-rows", "128,64"])
    with pytest.raises(SystemExit):
        gpu_moe.main()
    assert "--sort-rows 64: rows up to 64" in capsys.readouterr().err


def test_tiles_are_timed_with_plain_weights_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["gpu_moe.py", "--shape", "tiny", "--rows", "70", "--tiles", "--format", "fp8-block"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit):
        gpu_moe.main()
    assert "--tiles times plain weights, not --format fp8-block" in capsys.readouterr().err


def test_a_wrong_sort_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = torch.tensor([[2, 0], [0, 1]], dtype=torch.int32, device=DEVICE)
    monkeypatch.setattr(gpu_moe, "sort_pairs", lambda *given, step: sort_plainly(*given))
    gpu_moe.check_sorts(chosen, 3)

    def backwards(*given: object, step: int) -> object:
        lists = sort_plainly(*given)
        return replace(lists, order=lists.order.flip(0))

    monkeypatch.setattr(gpu_moe, "sort_pairs", backwards)
    with pytest.raises(SystemExit, match="kernel 1024: the order of 2 rows differ"):
        gpu_moe.check_sorts(chosen, 3)


def test_copies_take_turns() -> None:
    seen = list[int]()
    assert seconds_over(partial(list.append, seen), [1, 2, 3, 4, 5, 6]) >= 0
    if DEVICE.type == "cpu":
        assert seen == [1, 2, 3, 4, 5, 6] * 2
