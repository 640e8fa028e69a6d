"""The command line answers for itself: help, misuse, errors in one line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import headstart

from headstart.cli.main import COMMANDS


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """As a shell starts it."""
    command = [sys.executable, "-m", "headstart", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    result = headstart(command, "--help")
    assert result.returncode == 0
    assert "Usage" in result.stdout
    assert COMMANDS[command].split()[0] in result.stdout


def test_help_lists_every_command_with_its_purpose() -> None:
    text = headstart("--help").stdout
    for command, purpose in COMMANDS.items():
        assert command in text
        assert purpose[:20] in text


def test_help_names_every_option_whole_at_80_columns() -> None:
    text = headstart("distill", "--help", COLUMNS="80").stdout
    assert "--chat-template-kwargs" in text and "--no-prefix-caching" in text


def test_help_does_not_wait_for_torch() -> None:
    # The budget is 0.3 s on a quiet machine (benchmarks/help_time.py measures it); what would
    # break it is one of these modules, so their absence is tested, not the clock.
    code = (
        "import sys; sys.argv = ['headstart', '--help']\n"
        "from headstart.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'safetensors'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    "arguments",
    [("nonsense",), ("inspect",), ("inspect", "x", "--no-such-option"), ("export", "a", "b", "c")],
    ids=lambda a: " ".join(a),
)
def test_misuse_exits_with_2_and_without_a_traceback(arguments: tuple[str, ...]) -> None:
    result = headstart(*arguments)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("launch", "MODEL", "--engine", "foo"), "--engine is 'foo'"),
        (("launch", "MODEL", "--engine", "vllm", "--port", "0"), "--port is 0"),
        (("export", "MODEL", "--format", "foo", "--out", "OUT"), "'foo'"),
        (("convert", "MODEL", "--to", "foo", "--out", "OUT"), "'foo'"),
        (("export", "MODEL"), "no --out given"),
        (("calibrate", "--shape", "llama-1b", "--acceptance", "0.5"), "no --out given"),
        (
            ("calibrate", "--shape", "llama-1b", "--acceptance", "2", "--out", "OUT"),
            "--acceptance is 2.0",
        ),
        (("score", "MODEL", "--data", "DATA", "--bandwidth", "-1"), "--bandwidth is -1"),
        (("score", "MODEL", "--data", "DATA", "--rule", "foo"), "'foo'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_an_option_with_a_bad_value_exits_with_2_and_one_line(
    tiny: Callable[..., Path], tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    paths = {"MODEL": str(tiny("mimo")), "OUT": str(tmp_path / "out")}
    result = headstart(*(paths.get(word, word) for word in arguments))
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and said in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_failure_is_one_line_on_stderr_and_exits_with_1(tmp_path: Path) -> None:
    result = process("inspect", str(tmp_path / "nowhere"))
    assert result.returncode == 1
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")


def test_debug_adds_the_traceback(tmp_path: Path) -> None:
    result = process("--debug", "inspect", str(tmp_path / "nowhere"))
    assert result.returncode == 1
    assert "Traceback" in result.stderr


def test_version_is_printed() -> None:
    result = process("--version")
    assert result.stdout.startswith("headstart 0.")


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        ((), 1, "exists. Choose another"),
        (("--dry-run", "--weights", "foo"), 2, "--weights is 'foo'"),
    ],
    ids=["folder", "format"],
)
def test_calibrate_refuses_before_it_computes_a_large_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], code: int, said: str
) -> None:
    monkeypatch.setattr("headstart.calibrate.calibrated.write_calibrated", lambda *_, **__: 1 / 0)
    (tmp_path / "other").touch()
    words = ("calibrate", "--shape", "mimo-7b", "--acceptance", "0.8", "--out", str(tmp_path))
    result = headstart(*words, *given)
    assert result.returncode == code and said in result.stderr, result.stderr
