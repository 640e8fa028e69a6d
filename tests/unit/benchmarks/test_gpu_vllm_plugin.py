"""The plugin beside stock vLLM: what is measured first, and what a failure leaves."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import gpu_vllm_plugin as program
import pytest
from versus.measure import Failed
from versus.plugin_cases import SMALL, VOCAB, WHOLE, Variant

Asked = list[tuple[str, str]]


def engines(asked: Asked, failing: tuple[str, str]) -> Any:
    """Stand-ins for processes with vLLM; `failing` is whose answer to what is an error."""

    class Engine:
        log = "INFO headstart: drafts from 24 of 400 tokens"

        def __init__(self, name: str, told: dict[str, Any], folder: Path):
            self.name, self.settings = name, told

        def started(self) -> dict[str, Any]:
            self._answer("start")
            return {"start_seconds": 1.0}

        def ask(self, kind: str, **job: Any) -> dict[str, Any]:
            self._answer(kind)
            return {
                "answer": {"seconds": 0.5, "acceptance": None}, "first": {"tokens_per_step": 2.9},
                "swap": {"swap_seconds": 0.1}, "call": {"found": [{"written": 3}]},
            }[kind]  # fmt: skip

        def _answer(self, kind: str) -> None:
            if (self.name, kind) == failing:
                raise Failed("it is gone")
            asked.append((self.name, kind))

        def stop(self) -> None:
            asked.append((self.name, "stop"))

    return Engine


def measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, failing: tuple[str, str] = ("", ""),
    seconds: float = 100.0, smoke: bool = True,
) -> tuple[Asked, dict[str, Any]]:  # fmt: skip
    asked: Asked = []
    monkeypatch.setattr(program, "Worker", engines(asked, failing))
    monkeypatch.setattr(program, "looked_at", lambda folder, worker: {"answers": 3})
    names = ("stock", "vocab", "int8", "collect")
    case = VOCAB.__class__(
        "vocab", lambda *_: {name: Variant(tmp_path, {}) for name in names}, VOCAB.turns,
        VOCAB.swapping, VOCAB.collecting,
    )  # fmt: skip
    given = Namespace(
        out=tmp_path / "out.json", time_limit=seconds, repeats=2, smoke=smoke, models=tmp_path,
        python=None, patience=5,
    )  # fmt: skip
    run = program.Run(given, SMALL)
    program.measure(run, given, SMALL, case, tmp_path, [lambda: asked.append(("disk", "wait"))])
    return asked, json.loads((tmp_path / "out.json").read_text())


def test_the_vocabulary_comes_first_then_swaps_then_collecting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, found = measured(tmp_path, monkeypatch)
    result = found["cases"]["vocab"]
    assert [list(row)[1:] for row in result["rows"]] == [["stock", "vocab", "int8"]] * 2 + [
        ["vocab", "collect"]
    ] * 2
    assert len(result["swaps"]) == 2 and result["collected"]["answers"] == 3
    kinds = [(name, kind) for name, kind in asked if kind in ("swap", "call") or name == "collect"]
    firsts = list(dict.fromkeys(kinds))
    assert firsts == [
        ("collect", "start"), ("vocab", "swap"), ("collect", "answer"), ("collect", "first"),
        ("collect", "call"), ("collect", "stop"),
    ]  # fmt: skip
    # Nothing is timed while another checkpoint is written.
    assert asked.index(("disk", "wait")) < asked.index(("stock", "answer"))
    assert found["failures"] == []


@pytest.mark.parametrize(
    ("failing", "rows", "words"),
    [
        (("int8", "start"), 4, "int8: it is gone"),
        (("vocab", "swap"), 4, "swap to always-right: it is gone"),
        (("int8", "answer"), 4, "int8: it is gone"),
        (("collect", "call"), 4, "what was collected: it is gone"),
        (("collect", "start"), 2, "collect: it is gone"),
    ],
)
def test_what_fails_does_not_end_the_rest(
    failing: tuple[str, str], rows: int, words: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    asked, found = measured(tmp_path, monkeypatch, failing=failing)
    assert len(found["cases"]["vocab"]["rows"]) == rows
    assert words in found["failures"]
    assert {name for name, kind in asked if kind == "stop"} >= {"stock", "vocab"}


def test_what_there_is_no_time_for_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, found = measured(tmp_path, monkeypatch, seconds=10.0, smoke=False)
    assert found["cases"]["vocab"]["rows"] == []
    assert "vocab, 1 requests, stock, vocab, int8: not measured" in found["failures"][0]


def test_drafts_of_every_row_are_captured() -> None:
    """Up to 80 requests draft one token each, and the target's passes have four for each."""
    sizes = WHOLE.engine["compilation_config"]["cudagraph_capture_sizes"]
    for requests in WHOLE.requests["vocab"]:
        assert requests in sizes and requests * (WHOLE.drafts + 1) in sizes
    assert sizes == sorted(set(sizes))
    tokens = max(WHOLE.requests["vocab"]) * (WHOLE.prompt + WHOLE.answer)
    assert WHOLE.engine["kv_cache_memory_bytes"] > tokens * 2 * 8 * 128 * 2 * 37
