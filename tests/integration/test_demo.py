"""The demo: two engines side by side, and the command from set-up to its last line."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
from support import tiny_gguf
from support.commands import headstart
from support.engine_runs import assert_head_is_alive, checkpoint, greedy, start
from support.tiny_fixture import Tiny

from headstart.cli import demo as command
from headstart.demo import package, unpacked
from headstart.demo.race import SIDES, Race, Side, best_drafts, mean_speed_up, race
from headstart.demo.shipped import shipped_head
from headstart.engine.engine import Engine
from headstart.engine.output import Result
from headstart.errors import ConfigError, WriteFailed

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


@pytest.fixture(scope="module")
def engines(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[Side, Engine]:
    folder = tmp_path_factory.mktemp("race") / "model"
    shutil.copytree(checkpoint(tiny), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return {"plain": start(folder, speculate=0), "drafted": start(folder, speculate=2)}


def test_both_sides_say_the_same_and_only_one_drafts(engines: dict[Side, Engine]) -> None:
    heard: list[tuple[Side, int]] = []
    found = race(
        engines, "t5 t6 t7", greedy(30), category="words",
        show=lambda side, update, seconds: heard.append((side, len(update.token_ids))),
    )  # fmt: skip
    drafted, plain = found.answers["drafted"], found.answers["plain"]
    assert plain.token_ids == drafted.token_ids and found.divergence is None
    assert_head_is_alive([Result("", [], [drafted])])
    assert set(plain.origins) == {"bonus"}
    for side in SIDES:
        assert sum(count for name, count in heard if name == side) == 30
        assert found.seconds[side] > 0 and found.rates[side] == 30 / found.seconds[side]
    # In turns: neither waits for the other to end.
    order = [side for side, _ in heard]
    assert order != sorted(order) and order != sorted(order, reverse=True)
    assert best_drafts([found]) == 2 and mean_speed_up([found]) == found.speed_up
    assert json.loads(json.dumps(found.as_json()))["acceptance"]["drafted"][0] > 0
    assert not any(engine.has_work for engine in engines.values())


def test_an_interrupt_leaves_nothing_in_the_engines(engines: dict[Side, Engine]) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        race(engines, "t5 t6", greedy(30), show=interrupt)
    assert not any(engine.has_work for engine in engines.values())
    assert isinstance(race(engines, "t5 t6", greedy(5)), Race)


@pytest.fixture
def tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`headstart demo` with a file of a few kilobytes."""
    tiny_gguf.write_gguf(tmp_path / "tiny.gguf")
    own = partial(
        unpacked.ready, tmp_path / "tiny.gguf", cache=tmp_path / "cache",
        expected=package.sha256(tmp_path / "tiny.gguf"),
    )  # fmt: skip
    monkeypatch.setattr(unpacked, "shipped_head", lambda: None)
    monkeypatch.setattr("headstart.demo.engines.shipped_vocab", lambda: None)
    monkeypatch.setattr("headstart.demo.engines.MAX_LEN", tiny_gguf.POSITIONS)
    monkeypatch.setattr(unpacked, "ready", own)


@pytest.mark.usefixtures("tiny_model")
def test_the_command_ends_with_the_mean_speed_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command.run(out=out, weights="as-dtype", max_tokens=8, threads=1)
    said = capsys.readouterr()
    assert re.fullmatch(r"speed-up \d+\.\d\dx", said.out.splitlines()[-1])
    for part in ("head complete", "best K", "texts ", "headstart inspect demo", "tokens/s"):
        assert part in said.out
    if shipped_head() is None:
        assert ", untrained" in said.out and "the head is untrained" in said.out
        assert "made this one" not in said.out
    assert "set-up: dequantising" in said.err
    assert "Traceback" not in said.err
    page = (out / "report.html").read_text()
    assert "mean speed-up" in page and "data-demo" in page
    assert 'class="origin bonus"' in page, "tokens are tinted by origin"
    command.run(out=out, weights="as-dtype", max_tokens=8, threads=1, json_output=True)
    again = capsys.readouterr()
    document = json.loads(again.out)
    ratios = [
        race["tokens_per_second"]["drafted"] / race["tokens_per_second"]["plain"]
        for race in document["races"]
    ]
    assert len(ratios) == 5 and document["speed_up"] == pytest.approx(sum(ratios) / 5)
    assert all(race["divergence"] is None for race in document["races"])  # fp32: lossless
    assert "dequantising" not in again.err  # it was there


def test_misuse_is_refused_before_anything_is_unpacked(tmp_path: Path) -> None:
    done = headstart("demo", "--weights", "fp4")
    assert done.returncode == 2 and "'fp4' is not one of" in done.stderr
    with pytest.raises(ConfigError, match="--max-tokens is 1"):
        command.run(max_tokens=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteFailed, match="Choose another --out"):
        command.run(out=tmp_path / "file" / "x")
