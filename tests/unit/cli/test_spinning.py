from __future__ import annotations

import os
import subprocess
import sys

import pytest

from headstart.cli.spinning import limit_spinning


def test_spinning_is_bounded_unless_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    limit_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    limit_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setattr(os, "environ", {})
    limit_spinning()
    assert os.environ == {"GOMP_SPINCOUNT": "1000"}


def test_the_command_does_not_import_torch_before_it() -> None:
    """OpenMP reads its settings when torch is loaded; later is too late."""
    code = (
        "import sys, headstart.cli.main, headstart.cli.generate\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
