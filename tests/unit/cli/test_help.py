"""Help by task, examples that can be typed, the nearest name, and completion."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.command_lines import parse
from support.commands import headstart

from headstart.cli.commands import COMMANDS, EXAMPLES, TASKS
from headstart.cli.main import app

LINES = [line for lines in EXAMPLES.values() for line in lines]


def test_the_overview_stands_by_task() -> None:
    text = headstart("--help", COLUMNS="100").stdout
    places = [text.index(f"\n{task}:\n") for task in TASKS]
    assert places == sorted(places)
    for (task, commands), start in zip(TASKS.items(), places, strict=True):
        own = text[start:].split("\n\n")[0]
        assert all(f"  {name} " in own for name in commands), task


def test_every_command_has_examples_and_shows_them_whole() -> None:
    named = {name.split()[0] for name in EXAMPLES}
    assert named == set(COMMANDS)
    for name, lines in EXAMPLES.items():
        text = headstart(*name.split(), "--help", COLUMNS="60").stdout
        assert all(f"  {line}\n" in text for line in lines), name


@pytest.mark.parametrize("line", LINES)
def test_examples_can_be_parsed(line: str) -> None:
    """What commands do with them is tested elsewhere."""
    assert parse(line) in line


def test_an_example_with_a_wrong_option_would_be_found() -> None:
    with pytest.raises(Exception, match="--shap"):
        parse("headstart calibrate --shap x")


def test_options_of_a_part_stand_together() -> None:
    text = headstart("serve", "--help").stdout
    own, server, engine = (text.index(f"\n{title}:\n") for title in ("Options", "Server", "Engine"))
    assert own < text.index("--head") < server < text.index("--port") < engine
    assert engine < text.index("--kv-bytes")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["inspct"], "there is no command 'headstart inspct'; did you mean inspect?"),
        (["bench", "rn", "x"], "there is no command 'headstart bench rn'; did you mean run?"),
        (["xyzzy"], "there is no command 'headstart xyzzy'. `headstart --help` lists all."),
        (["export", "m", "--formt", "xllm"], "has no option --formt; did you mean --format?"),
        (["--vesion"], "headstart has no option --vesion; did you mean --version?"),
        (["inspect"], "missing argument 'MODEL'; `headstart inspect --help`"),
        (["generate", "m", "--max-tokens", "x"], "invalid value for '--max-tokens'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_misuse_is_one_line_with_the_nearest_name(words: list[str], said: str) -> None:
    result = headstart(*words)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_group_alone_shows_its_help() -> None:
    for words in ([], ["bench"]):
        result = headstart(*words)
        assert result.returncode == 2 and "Usage: headstart" in result.stderr


def completions(line: str) -> list[str]:
    """As bash asks for them, without torch in the process."""
    code = (
        "import sys\nfrom headstart.cli.main import main\n"
        "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules\n"
    )
    words = line.split(" ")
    environment = {
        "_HEADSTART_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    found = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True,
        text=True,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return found.stdout.split()


def test_the_shell_completes_commands_options_and_values() -> None:
    assert completions("headstart in") == ["inspect"]
    assert completions("headstart export --forma") == ["--format"]
    assert completions("headstart launch model --engine s") == ["sglang"]
    assert any("--install-completion" in parameter.opts for parameter in _parameters())


def _parameters() -> list[object]:
    import typer

    return list(typer.main.get_command(app).params)
