"""The script that puts a GPU's engine under pressure sees it on a CPU, and sees what is wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.tiny_fixture import Tiny

from headstart.engine.options import EngineOptions
from headstart.engine.output import Completion
from headstart.engine.stats import EngineStats, RequestStats
from headstart.errors import ConfigError
from headstart.sampling.choose import TokenLogprob

WORDS = ["gpu_pressure.py", "--device", "cpu", "--kernels", "off", "--drafts", "3"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    yield import_module("gpu_pressure")
    for name in ("gpu_pressure", "gpu_check"):
        sys.modules.pop(name, None)


def test_requests_lose_their_memory_find_others_and_leave(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [*WORDS, "--requests", "24", "--variants", "qwen3_next"])
    assert script.main() == 0
    (line, last) = capsys.readouterr().out.splitlines()
    assert line.split()[:3] == ["qwen3_next", "torch", "K=3"] and line.endswith(": same")
    assert last.startswith("0 failures on cpu")


@pytest.mark.usefixtures("no_clock")
def test_copies_are_drafted_with_hardly_any_memory(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*WORDS[:-1], "copies", "--requests", "16", "--variants", "mimo"]
    monkeypatch.setattr(sys, "argv", words)
    assert script.main() == 0
    (line, _) = capsys.readouterr().out.splitlines()
    assert line.split()[:3] == ["mimo", "torch", "K=copies"] and line.endswith(": same")
    assert " copied_accepted" in line and " 0 " not in line
    stats = EngineStats(preemptions=1, cached_tokens=1, aborted=1, copied_drafts=5)
    options, pool = EngineOptions(speculate="auto"), SimpleNamespace(num_used=0)
    engine = SimpleNamespace(stats=stats, options=options, pool=pool)
    assert script.faults(engine, [], []) == ["0 of 5 copied drafts right"]


def test_a_wrong_token_a_wrong_state_and_too_little_pressure_are_told(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = script.run

    def wrong(engine: Any, asked: Any) -> Any:
        found = usual(engine, asked)
        if engine.options.speculate:
            number = next(n for n, own in enumerate(found) if own.finish_reason != "abort")
            found[number].token_ids[-1] += 1
        else:
            one = found[0].logprobs[0]
            found[0].logprobs[0] = one._replace(logprob=one.logprob - 0.1)
        return found

    monkeypatch.setattr(script, "run", wrong)
    words = [*WORDS[:-1], "3,0", "--requests", "4", "--variants", "mimo"]
    monkeypatch.setattr(sys, "argv", words)
    assert script.main() == 1
    tokens, states, last = capsys.readouterr().out.splitlines()
    assert "DIFFERENT: tokens [" in tokens
    assert "DIFFERENT: log-probabilities 0.1 apart" in states
    assert last.startswith("2 failures on cpu")
    monkeypatch.setattr(script, "run", usual)
    assert script.main() == 1
    assert "DIFFERENT: no preemptions" in capsys.readouterr().out


def test_an_answer_that_was_cut_short_is_compared_as_far_as_it_goes(script: ModuleType) -> None:
    told = [TokenLogprob(token, -0.5, {}) for token in (3, 4, 5)]
    whole = Completion(0, [3, 4, 5], "", "length", None, [], told, RequestStats())
    cut = replace(whole, token_ids=[3, 4], finish_reason="abort", logprobs=told[:2])
    assert script.difference(cut, whole) is None
    assert script.difference(replace(cut, token_ids=[3, 5]), whole) is not None
    assert script.difference(replace(cut, finish_reason="length"), whole) is not None
    assert script.difference(replace(cut, logprobs=told[:1]), whole) is not None, "too few"


def test_memory_that_is_refused_for_another_reason_is_an_error(
    script: ModuleType, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the search for a small memory went on without end."""

    def refuses(*_: Any) -> None:
        raise ConfigError("another reason")

    monkeypatch.setattr(script, "plan_memory", refuses)
    with pytest.raises(ConfigError, match="another reason"):
        script.small(tiny("mimo"), "cpu", 0, 24, "off")
