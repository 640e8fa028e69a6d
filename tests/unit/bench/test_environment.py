"""What is written down about how a benchmark was started."""

from __future__ import annotations

import pytest

from headstart.bench.environment import environment, shown_command


@pytest.mark.parametrize(
    "words",
    [["--api-key", "hush"], ["--api-key=hush"], ["--api-key", "hush hush"], ["--api-key=hush hush"],
     ["--server-flags", "--api-key hush --threads 1 --api-key=hush"]],
    ids=" ".join,
)  # fmt: skip
def test_keys_are_not_written_down(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = shown_command(["headstart", "bench", *words, "--port", "1"])
    assert "hush" not in shown and shown.endswith("--port 1") and "--api-key" in shown
    monkeypatch.setattr("sys.argv", ["x", *words])
    assert "hush" not in environment()["command"]


def test_other_words_stay_as_they_are() -> None:
    words = ["headstart", "bench", "run", "a model", "--api-key-env", "NAME"]
    assert shown_command(words) == "headstart bench run 'a model' --api-key-env NAME"
