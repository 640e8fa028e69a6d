"""The number of threads: measured where it is open, left alone where it was chosen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from headstart.backends.torch import threads
from headstart.models.config_reader import model_config
from headstart.models.trunk import Trunk

RAW = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "vocab_size": 8, "max_position_embeddings": 16,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _same_threads_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "_AT_IMPORT", before)
    monkeypatch.setattr(threads, "usable_cores", lambda: 4)
    yield
    torch.set_num_threads(before)


def trunk() -> Trunk:
    model = Trunk(model_config(RAW), 16, torch.float32)
    for parameter in model.parameters():
        parameter.data.zero_()
    return model


@pytest.mark.parametrize(
    ("seconds", "best"),
    [({1: 4.0, 2: 2.0, 4: 1.0}, 4), ({1: 1.0, 2: 0.6, 4: 9.0}, 2), ({1: 1.0, 2: 0.97, 4: 0.96}, 1)],
    ids=["all cores", "the others are busy", "no gain"],
)
def test_the_fastest_number_is_taken_and_told(
    seconds: dict[int, float], best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "pass_seconds", lambda trunk: seconds[torch.get_num_threads()])
    (note,) = threads.measure_threads(trunk(), is_tuned=True)
    assert torch.get_num_threads() == best
    assert note.startswith(f"threads: {best}, the fastest")


def test_products_are_tuned_for_every_number_before_it_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: the library's own products gain nothing from threads, tuned ones do."""
    events: list[tuple[str, int]] = []
    monkeypatch.setattr(
        threads, "tune", lambda *_, **__: events.append(("tune", torch.get_num_threads()))
    )

    def timed(trunk: Trunk) -> float:
        events.append(("time", torch.get_num_threads()))
        return 1.0

    monkeypatch.setattr(threads, "pass_seconds", timed)
    threads.measure_threads(trunk(), is_tuned=True)
    assert events == [(what, count) for count in (1, 2, 4) for what in ("tune", "time")]
    events.clear()
    threads.measure_threads(trunk(), is_tuned=False)
    assert {what for what, _ in events} <= {"time"}


def test_a_pass_can_be_timed() -> None:
    assert threads.pass_seconds(trunk()) > 0


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "pass_seconds", lambda trunk: pytest.fail("was measured"))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads.measure_threads(trunk(), is_tuned=True) == []
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(threads, "_AT_IMPORT", before + 1)  # set by the program itself since
    assert threads.measure_threads(trunk(), is_tuned=True) == []
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("cores", [1, 4])
def test_compiled_kernels_get_all_cores(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: cores)
    told = ["threads: 4, all cores that may be used"] if cores > 1 else []
    assert threads.use_all_cores() == told
    assert torch.get_num_threads() == cores
    assert threads.use_all_cores() == [], "the number has been chosen by now"
