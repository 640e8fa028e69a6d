"""Text of others is shown on a terminal and cannot steer it."""

from __future__ import annotations

import ast
import errno
import io
import logging
import sys
from functools import partial
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text
from support.commands import headstart as run
from support.head_edits import edited
from support.tiny_fixture import Tiny

import headstart
from headstart.report.terminal import Console, say, shown
from headstart.server.recording import TextFormatter

PACKAGE = Path(headstart.__file__).parent
CONTROLS = [chr(code) for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"]
TITLE = "\x1b]0;owned\x07"  # sets a terminal's title


def test_every_control_character_is_an_escape_but_newline_and_tab() -> None:
    for control in CONTROLS:
        assert shown(f"a{control}b") == f"a\\x{ord(control):02x}b"
    assert shown("a\n\tb \u00e9\u4e2d\U0001f600 \\x1b") == "a\n\tb \u00e9\u4e2d\U0001f600 \\x1b"


def test_lines_have_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"error: {TITLE}")
    assert capsys.readouterr().out == "error: \\x1b]0;owned\\x07\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_console_colours_text_and_escapes_what_is_in_it(is_terminal: bool) -> None:
    out = io.StringIO()
    console = Console(
        file=out,
        force_terminal=is_terminal,
        color_system="standard" if is_terminal else None,
        highlight=False,
    )
    table = Table()
    table.add_column("name")
    table.add_row(TITLE)
    for renderable in (TITLE, Text(TITLE, style="green"), table, f"[green]{TITLE}[/]"):
        console.print(renderable)
    console.print(Text("a\nb\r"), end="")
    assert out.getvalue().count("\\x1b]0;") == 4
    assert not any(control in out.getvalue() for control in ("\x1b]", "\x07", "\r"))
    assert ("\x1b[32m" in out.getvalue()) is is_terminal  # colours are not text


def test_nothing_is_printed_in_another_way() -> None:
    """A print or a console of rich's own would let everything through."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            prints = isinstance(called, ast.Name) and called.id == "print"
            is_console = isinstance(node, ast.ImportFrom) and node.module == "rich.console"
            if prints or is_console:
                found.append(name)
    # `generate` escapes pieces of an answer and notes itself, and prints only numbers beside them.
    assert set(found) == {"report/terminal.py", "cli/generate.py"}
    assert found.count("cli/generate.py") == 4


def test_names_in_a_config_do_not_reach_the_terminal(tiny: Tiny, tmp_path: Path) -> None:
    named = partial(dict.update, model_type=TITLE, architectures=[f"{TITLE}ForCausalLM"])
    model = str(edited(tiny("mimo"), tmp_path / "model", change_config=named))
    for words in (("inspect", model), ("export", model, "--dry-run"), ("generate", model, "hi")):
        done = run(*words)
        assert "\\x1b]0;owned\\x07" in done.stdout + done.stderr
        assert "\x1b" not in done.stdout + done.stderr


def test_a_full_disk_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("headstart.cli.families.family_rows", full)
    done = run("families")
    assert done.returncode == 1 and "Errno" not in done.stderr
    assert "no space left on a disk that was written to" in done.stderr and "TMPDIR" in done.stderr


def test_tracebacks_do_not_either(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    run("--version")
    try:
        raise ValueError(TITLE)
    except ValueError as error:
        sys.excepthook(ValueError, error, error.__traceback__)
        record = logging.LogRecord("x", logging.ERROR, "", 0, "failed", None, sys.exc_info())
    for text in (capsys.readouterr().err, TextFormatter().format(record)):
        assert "ValueError: \\x1b]0;owned\\x07" in text and "\x1b" not in text
