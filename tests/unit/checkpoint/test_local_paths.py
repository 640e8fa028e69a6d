"""With --hide-paths nothing that is given to others tells where it lay on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.commands import headstart
from support.tiny_fixture import Tiny

from headstart.bench.environment import environment
from headstart.checkpoint.local_paths import VARIABLE, shown, shown_words, without_paths
from headstart.server.options import ServerOptions
from headstart.server.state import ServerState


@pytest.fixture
def _hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")


def test_paths_are_shown_unless_they_are_to_be_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert shown("/a/b") == "/a/b" and shown_words(["--out=/a/b"]) == ["--out=/a/b"]
    assert without_paths({"a": "/a/b"}) == {"a": "/a/b"}


@pytest.mark.usefixtures("_hidden")
def test_the_last_part_of_a_path_stays(tmp_path: Path) -> None:
    assert shown("/a/secret/model") == shown("../secret/model") == "model"
    assert shown(tmp_path) == tmp_path.name
    assert shown("zai-org/GLM-4.5") == "zai-org/GLM-4.5"  # no path of this machine
    words = ["export", "/a/b/model", "--out=/c/d", "--head", "../e/f", "--rate=0.5", "x=/y"]
    assert shown_words(words) == ["export", "model", "--out=d", "--head", "f", "--rate=0.5", "x=/y"]
    document = {"a": ["from /a/b/c and '/d/e'", {"b": "/f/g h"}], "n": 5, "u": "http://h/a/b 1/2"}
    assert without_paths(document) == {
        "a": ["from c and 'e'", {"b": "g h"}], "n": 5, "u": "http://h/a/b 1/2",
    }  # fmt: skip


@pytest.mark.usefixtures("_hidden")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/jane doe/x", "x"),
        ("head of /home/jane doe/x and /y/z", "head of x and z"),
        ("'/home/jane doe/x' 1/2", "'x' 1/2"),
    ],
)
def test_folders_with_blanks_are_hidden(text: str, expected: str) -> None:
    assert without_paths({"a": text}) == {"a": expected}


def test_a_verifier_is_named_without_its_folder(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "0")  # and back at the end: the flag sets it
    model, out = tiny("qwen3_5"), tmp_path / "head"
    words = ("export", str(model), "--format", "speculators", "--out", str(out), "--hide-paths")
    assert headstart(*words).returncode == 0
    verifier = json.loads((out / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier["name_or_path"] == model.name


def test_results_carry_no_paths(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "0")  # and back at the end: the flag sets it
    model, out = tiny("mimo"), tmp_path / "head"
    done = headstart("export", str(model), "--out", str(out), "--hide-paths")
    assert done.returncode == 0, done.stderr
    text = (out / "headstart.json").read_text()
    assert str(model.parent) not in text and str(tmp_path) not in text
    assert f"export {model.name} --out head" in json.loads(text)["command"]
    assert json.loads(text)["sources"][0]["path"] == model.name
    assert headstart("stitch", str(out), str(model), "--out", str(tmp_path / "s")).returncode == 0


@pytest.mark.usefixtures("_hidden")
def test_servers_and_benchmarks_tell_no_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> None:
        raise AssertionError

    state = ServerState("/a/secret/model", ServerOptions(), never, is_public=False)
    assert (state.root, list(state.names)) == ("model", ["model"])
    assert b"secret" not in state.metrics_page.render()[0]
    state.close()
    monkeypatch.setattr("sys.argv", ["headstart", "bench", "run", "/a/secret/model"])
    assert environment()["command"] == "headstart bench run model"
