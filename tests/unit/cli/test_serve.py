"""`headstart serve` refuses what it can before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from headstart.cli.main import app
from headstart.errors import ConfigError, HeadstartError

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
