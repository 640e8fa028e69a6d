"""`headstart serve` refuses what it can before a model is loaded; its learner drafts as it does."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from headstart.cli.main import app
from headstart.cli.serve import _serve
from headstart.demo import shipped as shipping
from headstart.engine import engine
from headstart.engine.options import EngineOptions
from headstart.errors import ConfigError, HeadstartError
from headstart.learn import starting, supervisor
from headstart.learn.folder import START, Folder
from headstart.learn.heads import LearnedHeads
from headstart.learn.options import LearnOptions
from headstart.learn.process import Task
from headstart.learn.supervisor import Learning
from headstart.learn.vocabs import FILE, vocab_beside, write_vocab
from headstart.server import lifecycle
from headstart.server.options import ServerOptions
from headstart.vocab.draft_vocab import DraftVocab
from headstart.vocab.files import write

pytestmark = pytest.mark.usefixtures("logging_as_before")


@pytest.mark.parametrize("flag", ["--tool-call-parser", "--reasoning-parser"])
def test_a_format_that_nobody_knows_is_refused_at_once(tmp_path: Path, flag: str) -> None:
    """The folder has no model, which would be the next to be said."""
    result = CliRunner().invoke(app, ["serve", str(tmp_path), "--port", "0", flag, "hermees"])
    assert isinstance(result.exception, ConfigError) and "hermees" in str(result.exception)
    assert "loading" not in result.output


def test_a_draft_vocabulary_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent.json")
    result = CliRunner().invoke(
        app, ["serve", str(tmp_path), "--port", "0", "--draft-vocab", absent]
    )
    assert isinstance(result.exception, HeadstartError) and "absent.json" in str(result.exception)
    assert "loading" not in result.output


def test_a_draft_vocabulary_without_drafts_is_refused_at_once(tmp_path: Path) -> None:
    given = ["--port", "0", "--speculate", "0", "--draft-vocab", "any.json"]
    result = CliRunner().invoke(app, ["serve", str(tmp_path), *given])
    assert isinstance(result.exception, ConfigError) and "Drop one" in str(result.exception)
    assert "loading" not in result.output


BEFORE, LEARNED, OTHER = (DraftVocab.of(range(first, first + 9)) for first in (0, 20, 40))


@pytest.mark.parametrize("own", [0, 4], ids=["alone", "with own tokens"])
@pytest.mark.parametrize("given", ["the demo's", "as before", "another one"])
def test_engine_and_learner_draft_with_the_same_vocabulary(
    given: str, own: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the learner had the demo's list while the engine drafted with the renewed one."""
    folder = Folder(tmp_path / "learned")
    folder.make(1.0)
    heads = LearnedHeads(folder)
    for name in (START, "0001"):
        heads.path(name).mkdir()
    heads.add("0001", {})
    heads.serve("0001")
    shipped, other = tmp_path / "shipped.json", tmp_path / "other.json"
    write([BEFORE], shipped)
    write([OTHER], other)
    monkeypatch.setattr(shipping, "shipped_vocab", lambda: shipped)
    write_vocab(BEFORE, heads.path(START))
    write_vocab(LEARNED, heads.path("0001"))
    file = {"the demo's": None, "as before": str(shipped), "another one": str(other)}[given]
    task = Task(folder=str(folder.path), model="demo", head=None, base=None, device="cpu",
                dtype="auto", max_bytes=1, overrides={})  # fmt: skip
    learned: list[Task] = []
    served: list[EngineOptions] = []

    def child(task: Task, heard: object, *, shares_gpu: bool) -> SimpleNamespace:
        learned.append(task)
        ready = threading.Event()
        ready.set()
        return SimpleNamespace(is_ready=ready, close=lambda: None)

    def serving(
        model: str, server: object, make_engine: Callable[[], object], _: object, learning: Learning
    ) -> int:
        make_engine()
        learning.close()
        return 0

    monkeypatch.setattr(starting, "open_folder", lambda *_, **__: task)
    monkeypatch.setattr(supervisor, "Child", child)
    monkeypatch.setattr(lifecycle, "serve", serving)
    monkeypatch.setattr(engine, "Engine", lambda *_, options, **__: served.append(options))
    with socket.socket() as listener:
        options = EngineOptions(device="cpu", draft_vocab=file, draft_vocab_own=own)
        learn = LearnOptions(learn=folder.path)
        assert _serve("demo", ServerOptions(), None, options, listener, learn) == 0
    expected = file if given == "another one" else str(heads.path("0001") / FILE)
    assert [(each.vocab, each.renews_vocab) for each in learned] == [(expected, own == 0)]
    assert [each.draft_vocab for each in served] == [expected]
    found = [vocab_beside(heads.path(name)) for name in (START, "0001")]
    assert found == ([OTHER, OTHER] if given == "another one" else [BEFORE, LEARNED])


@pytest.mark.parametrize(
    ("device", "where", "fraction", "makes"),
    [("cpu", "same", None, False), ("cpu", "same", 0.5, True), ("cuda:0", "same", None, True),
     ("cuda:0", "cuda:1", None, False), ("cuda:0", "cpu", 0.5, False)],
)  # fmt: skip
def test_a_blank_step_comes_first_where_memory_for_requests_is_what_is_left(
    device: str, where: str, fraction: float | None, makes: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = Folder(tmp_path / "learned")
    folder.make(1.0)
    task = Task(folder=str(folder.path), model="demo", head=None, base=None, device=device,
                dtype="auto", max_bytes=1, overrides={})  # fmt: skip
    learned: list[Task] = []
    promised: list[int] = []

    def child(task: Task, heard: Callable[..., None], *, shares_gpu: bool) -> SimpleNamespace:
        learned.append(task)
        heard("ready", {"bytes": 1, "to_come": 7})
        return SimpleNamespace(is_ready=SimpleNamespace(wait=lambda seconds: True),
                               close=lambda: None)  # fmt: skip

    def serving(
        model: str, server: object, make_engine: Callable[[], object], _: object, learning: Learning
    ) -> int:
        make_engine()
        learning.close()
        return 0

    monkeypatch.setattr(starting, "open_folder", lambda *_, **__: task)
    monkeypatch.setattr(supervisor, "Child", child)
    monkeypatch.setattr(lifecycle, "serve", serving)
    monkeypatch.setattr(
        engine, "Engine", lambda *_, promised_bytes, **__: promised.append(promised_bytes)
    )
    with socket.socket() as listener:
        options = EngineOptions(device=device, memory_fraction=fraction)
        learn = LearnOptions(learn=folder.path, learn_device=where)
        assert _serve("any", ServerOptions(), None, options, listener, learn) == 0
    assert [each.makes_blank_step for each in learned] == [makes]
    assert promised == [7 if where == "same" else 0]
