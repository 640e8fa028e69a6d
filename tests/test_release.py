"""What is released: one version, typed, and packages that hold everything that is used."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from support.long_runs import IS_LONG

import headstart

ROOT = Path(__file__).resolve().parent.parent
BUILD = "from setuptools import build_meta as b; import sys; getattr(b, sys.argv[1])(sys.argv[2])"


def files_of_git(*patterns: str) -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return found.stdout.splitlines()


def test_the_version_is_written_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "headstart.__version__"}
    top = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert top is not None and top[1] == headstart.__version__
    pattern = re.compile(rf"(?<![\d.]){re.escape(headstart.__version__)}(?![\d.])")
    named = [n for n in files_of_git("headstart/*.py") if pattern.search((ROOT / n).read_text())]
    assert named == ["headstart/__init__.py"]


def test_examples_are_checked_by_types_and_the_package_says_that_it_has_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "examples" in project["tool"]["mypy"]["files"]
    assert (ROOT / "headstart/py.typed").exists()


@pytest.mark.skipif(not IS_LONG, reason="building and installing takes a while")
def test_packages_hold_all_files_and_run_where_they_are_installed(tmp_path: Path) -> None:
    tree, dist = tmp_path / "tree", tmp_path / "dist"
    dist.mkdir()
    for name in files_of_git():
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    subprocess.run([sys.executable, "-c", BUILD, "build_sdist", dist], cwd=tree, check=True)
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    subprocess.run([sys.executable, "-c", BUILD, "build_wheel", dist], cwd=unpacked, check=True)
    (wheel,) = dist.glob("*.whl")
    assert wheel.name == f"headstart-{headstart.__version__}-py3-none-any.whl"
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in inside if not name.startswith("headstart-")} == set(
        files_of_git("headstart")
    )
    target = tmp_path / "installed"
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target]
    subprocess.run([sys.executable, *install, wheel], check=True)
    code = "import headstart.cli.main as m, headstart.server.page as p; p.document(); m.main()"
    run = subprocess.run(
        [sys.executable, "-c", code, "--version"], cwd=tmp_path, env={"PYTHONPATH": str(target)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.stdout == f"headstart {headstart.__version__}\n", run.stderr
    assert (target / "bin/headstart").is_file()
