"""Served texts on disk: what a kill leaves, what is thinned out, what is held out."""

from __future__ import annotations

import errno
from pathlib import Path
from time import time as now

import pytest

from headstart.learn import store as store_module
from headstart.learn.store import Store, TextWriter, even_sample, shared_room
from headstart.learn.texts import Text, read_line


def text(number: int, kind: str = "chat", time: float = 0.0, tokens: int = 8) -> Text:
    return Text(
        id=f"t{number}", prompt=[1, 2, number + 3], answer=[5] * tokens, kind=kind, time=time,
        finish_reason="stop", seed=number, sampling={"temperature": 0.5}, max_tokens=99,
    )  # fmt: skip


def test_a_text_survives_the_disk_as_a_record(tmp_path: Path) -> None:
    with TextWriter(tmp_path) as writer:
        writer.add([text(1), text(2)])
    store = Store(tmp_path, 1 << 20)
    assert len(store.refresh()) == 2
    record = store.texts["t1"].record
    assert list(record.ids) == [1, 2, 4, *[5] * 8]
    assert record.mask.sum() == 8 and record.num_prompt == 3
    assert record.is_replayable and record.sampling == {"temperature": 0.5}


def test_half_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    line = text(1).line()
    path = tmp_path / "served-00000001.jsonl"
    path.write_bytes(line + line.replace(b"t1", b"t2")[:30])
    store = Store(tmp_path, 1 << 20)
    assert len(store.refresh()) == 1
    path.write_bytes(line + line.replace(b"t1", b"t2"))
    assert len(store.refresh()) == 1
    assert set(store.texts) == {"t1", "t2"}


@pytest.mark.parametrize(
    "line",
    [b"", b"{}", b"[1]", b'{"id": 1}', text(1).line().replace(b"[1,2,4]", b"[1,-2,4]"),
     text(1).line().replace(b'"time":0.0', b'"time":"x"')],
    ids=["empty", "no field", "list", "few fields", "negative id", "time is text"],
)  # fmt: skip
def test_lines_of_others_are_no_texts(line: bytes) -> None:
    assert read_line(line) is None


def test_a_batch_that_did_not_fit_leaves_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = TextWriter(tmp_path)
    writer.add([text(1)])
    file = writer._current()

    class Full:
        def __getattr__(self, name: str) -> object:
            return getattr(file, name)

        def write(self, data: bytes) -> int:
            file.write(data[:20])
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer, "_file", Full())
    with pytest.raises(OSError, match="No space"):
        writer.add([text(2)])
    monkeypatch.setattr(writer, "_file", file)
    writer.add([text(3)])
    writer.close()
    store = Store(tmp_path, 1 << 20)
    store.refresh()
    assert set(store.texts) == {"t1", "t3"}


def test_thinning_keeps_rare_kinds_and_all_times(tmp_path: Path) -> None:
    writer = TextWriter(tmp_path)
    common = [text(i, "common", time=float(i)) for i in range(400)]
    rare = [text(1000 + i, "rare", time=float(i)) for i in range(10)]
    writer.add([*common, *rare])
    writer.close()
    with TextWriter(tmp_path) as newest:  # its file stays as it is
        newest.add([text(5000, "common", time=401.0)])
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    store = Store(tmp_path, size // 4)
    store.refresh()
    assert store.thin() > 200
    kinds = [kept.record.category for kept in store.texts.values()]
    assert kinds.count("rare") == 10
    times = sorted(k.time for k in store.texts.values() if k.record.category == "common")
    assert times[0] < 40 and times[-1] > 360, "both ends of the time are there"
    quarters = [sum(q * 100 <= t < (q + 1) * 100 for t in times) for q in range(4)]
    assert max(quarters) < 2 * min(quarters)
    assert store.num_bytes <= store.max_bytes
    again = Store(tmp_path, store.max_bytes)
    again.refresh()
    assert set(again.texts) == set(store.texts)


def test_a_store_that_is_smaller_than_a_file_is_thinned_out(tmp_path: Path) -> None:
    """Regression: the newest file, which stays as it is, was all of a small store."""
    store = Store(tmp_path, 20000)
    with TextWriter(tmp_path, store.max_bytes) as writer:
        for number in range(400):
            writer.add([text(number, time=float(number))])
            if number % 5 == 0:
                store.refresh()
                store.thin()
            assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= store.max_bytes
    times = sorted(kept.time for kept in store.texts.values())
    assert times[0] < 60 and len(times) > 60


def test_a_disk_that_takes_no_more_while_texts_are_packed_costs_none_that_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_FILE_BYTES", 1000)
    with TextWriter(tmp_path) as writer:
        for number in range(100):
            writer.add([text(number, time=float(number))])
    store = Store(tmp_path, 1 << 20)
    store.refresh()
    store.max_bytes, number_of_files = store.num_bytes // 2, len(list(tmp_path.iterdir()))
    wanted = even_sample(store.texts, int(0.7 * store.max_bytes))
    write, calls = store_module.write_whole, list[Path]()

    def full(path: Path, data: bytes, **given: bool) -> None:
        calls.append(path)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data, **given)

    monkeypatch.setattr(store_module, "write_whole", full)
    with pytest.raises(OSError, match="No space"):
        store.thin()
    assert 2 < len(list(tmp_path.iterdir())) < number_of_files, "a part of them is packed"
    again = Store(tmp_path, store.max_bytes)
    again.refresh()
    assert set(again.texts) == set(store.texts) > wanted and again.num_bytes == store.num_bytes
    again.thin()
    assert set(again.texts) < set(store.texts) and again.num_bytes <= store.max_bytes
    last = Store(tmp_path, store.max_bytes)
    last.refresh()
    assert set(last.texts) == set(again.texts) and not again.refresh()


@pytest.mark.parametrize("wrong", [0.0, 9e9], ids=["a clock that was not set", "one far ahead"])
def test_a_wrong_time_does_not_cost_the_evenness_of_others(wrong: float, tmp_path: Path) -> None:
    """Regression: all other texts were one span of time, and of these a burst took the room."""
    with TextWriter(tmp_path) as writer:
        quiet = [text(i, time=1e9 + 100.0 * i) for i in range(40)]
        burst = [text(100 + i, time=1e9 + 2000 + i / 100) for i in range(400)]
        writer.add([text(1000, time=wrong), *quiet, *burst])
    store = Store(tmp_path, 1 << 20)
    store.refresh()
    assert max(kept.time for kept in store.texts.values()) <= now()
    kept = even_sample(store.texts, store.num_bytes // 4)
    assert sum(f"t{i}" in kept for i in range(40)) >= 35


def test_texts_that_come_before_thinning_are_new_to_the_reader(tmp_path: Path) -> None:
    """Regression: they were learned from, but nobody was told of their tokens."""
    with TextWriter(tmp_path) as writer:
        writer.add([text(i, time=float(i)) for i in range(100)])
    store = Store(tmp_path, 1 << 20)
    store.refresh()
    store.max_bytes = store.num_bytes // 2
    for number in (200, 201):  # the first file is packed with the older ones
        with TextWriter(tmp_path) as writer:
            writer.add([text(number, time=100.0)])
    dropped = store.thin()
    assert {"t200", "t201"} <= set(store.texts)
    assert dropped == 102 - len(store.texts) and 0 < dropped < 100


def test_a_kill_between_packing_and_removing_counts_texts_once(tmp_path: Path) -> None:
    writer = TextWriter(tmp_path)
    writer.add([text(i) for i in range(5)])
    writer.close()
    (tmp_path / "packed-00000001.jsonl").write_bytes(
        (tmp_path / "served-00000001.jsonl").read_bytes()
    )
    store = Store(tmp_path, 1 << 20)
    assert len(store.refresh()) == 5


def test_what_a_kill_left_packed_twice_does_not_take_the_room_for_good(tmp_path: Path) -> None:
    """Regression: the server saw a full folder, and the learner one with room."""
    with TextWriter(tmp_path) as writer:
        writer.add([text(i, time=float(i)) for i in range(50)])
    with TextWriter(tmp_path) as writer:
        writer.begin()
    done = tmp_path / "served-00000001.jsonl"
    (tmp_path / "packed-00000001.jsonl").write_bytes(done.read_bytes())
    size = done.stat().st_size
    store = Store(tmp_path, int(1.5 * size))
    store.refresh()
    assert store.thin() == 0 and len(store.texts) == 50 and not done.exists()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == size == store.num_bytes


def test_room_that_a_small_part_does_not_need_goes_to_others() -> None:
    assert shared_room({"a": 10, "b": 1000, "c": 1000}, 210) == {"a": 10, "b": 100, "c": 100}


def test_an_even_sample_twice_is_the_same_sample(tmp_path: Path) -> None:
    with TextWriter(tmp_path) as writer:
        writer.add([text(i, time=float(i)) for i in range(100)])
    store = Store(tmp_path, 1 << 20)
    store.refresh()
    once = even_sample(store.texts, 4000)
    assert once == even_sample(store.texts, 4000) and 0 < len(once) < 100


def test_a_prompt_is_always_on_the_same_side() -> None:
    sides = [text(i).is_heldout for i in range(300)]
    assert sides == [text(i).is_heldout for i in range(300)]
    assert 20 < sum(sides) < 80
