"""Answers between two writes: what is held, and what a full disk or store costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headstart.learn import collector
from headstart.learn.collector import Collector
from headstart.learn.folder import Folder
from headstart.learn.store import Store
from headstart.learn.texts import Text

Making = Callable[..., Collector]


def text(number: int, kind: str, tokens: int = 3) -> Text:
    return Text(id=f"t{number}", prompt=[number], answer=[1] * (tokens - 1), kind=kind,
                time=time.time(), finish_reason="stop")  # fmt: skip


@pytest.fixture
def collecting(tmp_path: Path) -> Iterator[Making]:
    """Makes collectors whose thread does not run."""
    folder, made = Folder(tmp_path / "learn"), list[Collector]()
    folder.make(1)

    def make(max_bytes: int = 1 << 20) -> Collector:
        made.append(Collector(folder, max_bytes))
        return made[-1]

    yield make
    for own in made:
        own._writer.close()


def offer(own: Collector, number: int, kind: str, tokens: int = 3) -> None:
    own.offer(text(number, kind, tokens))


def kept(tmp_path: Path) -> list[str]:
    store = Store(Folder(tmp_path / "learn").texts, 1 << 30)
    return [found.record.category for found in store.refresh()]


def test_a_rare_kind_is_kept_beside_a_flood_of_another(collecting: Making, tmp_path: Path) -> None:
    own = collecting()
    for number in range(3000):
        offer(own, number, "rare" if number % 1000 == 0 else "common")
    own.flush()
    found = kept(tmp_path)
    assert found.count("rare") == 3 and found.count("common") == 256
    assert own.counts.texts == 259 and own.counts.passed_over == 3000 - 259


def test_long_answers_are_held_within_bounds_while_the_disk_hangs(
    collecting: Making, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "_MOST_TOKENS", 1000)
    own = collecting()
    offer(own, 0, "rare", tokens=100)
    for number in range(1, 200):
        offer(own, number, "common", tokens=100)
    offer(own, 200, "huge", tokens=500)
    assert own._num_tokens <= 1000 and own.counts.passed_over == 201 - 6
    own.flush()
    assert sorted(kept(tmp_path)) == [*["common"] * 4, "huge", "rare"]
    for number in range(300, 306):
        offer(own, number, "common", tokens=100)
    own.flush()
    assert kept(tmp_path).count("common") == 10, "and goes on afterwards"


def test_texts_never_take_more_than_their_room(
    collecting: Making, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: where the learner did not thin them out they took a quarter more."""
    own = collecting(10000)
    for number in range(1000):
        offer(own, number, "a")
        if number % 10 == 9:
            own.flush()
    size = sum(path.stat().st_size for path in (tmp_path / "learn" / "texts").iterdir())
    assert 10000 <= size < 10000 + 10 * len(text(1000, "a").line())
    assert own.counts.lost > 0 and "no room for more texts" in caplog.text


def test_a_store_that_was_given_less_room_collects_again_when_it_is_thinned_out(
    collecting: Making, tmp_path: Path
) -> None:
    """Regression: the newest file stays as it is, and was all there was."""
    own = collecting()
    for number in range(200):
        offer(own, number, "a")
    own.flush()
    own = collecting(5000)
    offer(own, 500, "a")
    own.flush()
    assert own.counts.lost == 1
    store = Store(Folder(tmp_path / "learn").texts, 5000)
    store.refresh()
    assert store.thin() > 100
    offer(own, 501, "a")
    own.flush()
    assert own.counts.texts == 1
