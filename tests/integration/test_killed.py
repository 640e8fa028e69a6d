"""Commands stopped at random moments: the source stays, a result is whole or absent."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support import SCRIPTS
from support.gguf_models import random_bits, write_head, write_trunk
from support.long_runs import IS_LONG

from headstart.checkpoint.reader import Checkpoint
from headstart.heads.formats import open_head
from headstart.heads.formats.gguf.archs import arch_named

SLOW = SCRIPTS / "slow_headstart.py"
ROUNDS = 6


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny("deepseek_v3", shard_bytes=400_000)


@pytest.fixture(scope="module")
def head(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("head") / "head"
    finish(headstart("export", str(model), "--out", str(out)))
    return out


def headstart(*arguments: str, pause: float = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SLOW), str(pause), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> None:
    output = process.communicate(timeout=30)
    assert process.returncode == 0, output


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def partials(parent: Path) -> list[Path]:
    return [path for path in parent.iterdir() if ".partial-" in path.name]


def wait_for_partial(process: subprocess.Popen[str], parent: Path) -> None:
    """Until the command has begun to write."""
    while process.poll() is None and not partials(parent):
        time.sleep(0.001)
    assert process.poll() is None, process.communicate()


def stop_midway(process: subprocess.Popen[str], parent: Path, seconds: float, by: int) -> str:
    wait_for_partial(process, parent)
    time.sleep(seconds)
    process.send_signal(by)
    return process.communicate(timeout=20)[1]


def command(name: str, model: Path, head: Path, out: Path) -> list[str]:
    inputs = [str(model)] if name == "export" else [str(head), str(model)]
    return [name, *inputs, "--out", str(out)]


@pytest.mark.parametrize("name", ["export", "stitch"])
def test_killed_at_any_moment_there_is_no_result_and_the_next_run_succeeds(
    model: Path, head: Path, tmp_path: Path, name: str
) -> None:
    before, out = bytes_of(model), tmp_path / "out"
    moments = random.Random(name)
    saw_partial = 0
    for _ in range(ROUNDS):
        process = headstart(*command(name, model, head, out), pause=0.02)
        stop_midway(process, tmp_path, moments.uniform(0, 0.3), signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        assert not out.exists()
        assert bytes_of(model) == before
        saw_partial += len(partials(tmp_path))
    assert saw_partial == ROUNDS, "every kill leaves one folder, the next run clears it"
    finish(headstart(*command(name, model, head, out)))
    assert partials(tmp_path) == []
    Checkpoint.open(out)
    assert bytes_of(model) == before


@pytest.mark.skipif(not IS_LONG, reason="the writer is that of the tests above: make test-long")
@pytest.mark.parametrize("kind", ["gguf", "mlx"])
def test_killed_while_a_head_is_put_into_another_home(
    kind: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    head, trunk, out = tiny("qwen3_5"), tmp_path / "trunk", tmp_path / "results" / "out"
    out.parent.mkdir()
    if kind == "gguf":
        arch = arch_named("qwen35")
        assert arch is not None
        head = write_head(arch, tmp_path / "head", random_bits())
        words = ["stitch", str(head), str(write_trunk(arch, trunk))]
    else:
        shutil.copytree(tiny("qwen3_5", with_head=False), trunk)
        for file in trunk.glob("*.safetensors"):
            save_file(load_file(file), file, metadata={"format": "mlx"})
        words = ["restore", str(trunk), "--from", str(head), "--mlx-layout", "vllm-mlx"]
    before, moments = bytes_of(trunk), random.Random(kind)
    for _ in range(ROUNDS):
        process = headstart(*words, "--out", str(out), pause=0.02)
        stop_midway(process, out.parent, moments.uniform(0, 0.1), signal.SIGKILL)
        assert not out.exists() and bytes_of(trunk) == before
    finish(headstart(*words, "--out", str(out)))
    assert partials(out.parent) == [] and bytes_of(trunk) == before
    assert open_head(out).tensors.keys() == open_head(head).tensors.keys()


@pytest.mark.parametrize(
    ("by", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["term", "int"]
)
@pytest.mark.parametrize("name", ["export", "stitch"])
def test_asked_to_stop_it_cleans_up_at_once(
    model: Path, head: Path, tmp_path: Path, by: int, code: int, name: str
) -> None:
    before = bytes_of(model)
    process = headstart(*command(name, model, head, tmp_path / "out"), pause=0.02)
    said = stop_midway(process, tmp_path, 0.1, by)
    assert process.returncode == code
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []
    assert bytes_of(model) == before


def test_overwriting_killed_at_any_moment_the_target_is_old_or_new_and_whole(
    model: Path, tmp_path: Path
) -> None:
    """The old result is of another format, so that the two can be told apart by their files."""
    olds, out = tmp_path / "old", tmp_path / "out"
    finish(headstart("export", str(model), "--out", str(olds), "--format", "xllm"))
    old = bytes_of(olds)
    moments = random.Random(3)
    outcomes = set()
    for round_ in range(ROUNDS):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(olds, out)
        process = headstart("export", str(model), "--out", str(out), "--overwrite", pause=0.002)
        wait_for_partial(process, tmp_path)
        if round_ % 2:  # right at the exchange and the removal of what was replaced
            while process.poll() is None and "head.safetensors" not in _names(out):
                time.sleep(0.0002)
        else:
            time.sleep(moments.uniform(0, 0.1))
        process.kill()
        process.communicate()
        if bytes_of(out) == old:
            outcomes.add("old")
        else:
            outcomes.add("new")
            assert {"head.safetensors", "headstart.json", "config.json"} <= _names(out)
            assert "mtp_layer_parameters.safetensors" not in _names(out)
            assert len(Checkpoint.open(out).tensors) == len(Checkpoint.open(olds).tensors)
    assert outcomes == {"old", "new"}
    finish(headstart("export", str(model), "--out", str(out), "--overwrite"))
    assert partials(tmp_path) == []


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_two_runs_on_one_target_do_not_disturb_each_other(model: Path, tmp_path: Path) -> None:
    arguments = ["export", str(model), "--out", str(tmp_path / "out")]
    first = headstart(*arguments, pause=0.05)
    wait_for_partial(first, tmp_path)
    second = headstart(*arguments)
    _, said = second.communicate(timeout=20)
    assert second.returncode == 1
    assert said.startswith("error: another run is writing"), said
    finish(first)
    assert partials(tmp_path) == []
