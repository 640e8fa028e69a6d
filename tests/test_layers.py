"""Imports point one way only: docs/architecture.md lists the layers, this test enforces them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import headstart

PACKAGE = Path(headstart.__file__).parent

# Lower layers first. Packages in one layer are strangers to each other.
LAYERS = [
    {"errors", "files"},
    {"checkpoint", "families", "report", "sampling"},
    {"calibrate", "data", "vocab"},
    {"heads", "models"},
    {"backends"},
    {"assembly"},
    {"simulate"},
    {"launch", "engine", "train"},
    {"bench", "distill", "predict", "server"},
    {"demo"},
    {"cli"},
]
# Computing packages, which the command line imports only when it runs a model.
TORCH_PACKAGES = {
    "sampling", "models", "backends", "assembly", "simulate", "engine", "train", "server",
}  # fmt: skip
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}
FILES = sorted(path for path in PACKAGE.rglob("*.py"))


def imported_packages(path: Path) -> set[str]:
    """Top-level parts of headstart that a file imports, wherever the import stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module]
            if node.module == "headstart":
                names = [f"headstart.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("headstart.")}
    return {name for name in found if not name.startswith("__")}


def owner(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_imports_only_from_layers_below_its_own(path: Path) -> None:
    package = owner(path)
    if package in ("__init__", "__main__"):
        return
    for other in imported_packages(path) - {package}:
        assert LEVEL[other] < LEVEL[package], f"{package} may not import {other}"


def test_every_package_has_a_layer() -> None:
    packages = {owner(path) for path in FILES} - {"__init__", "__main__"}
    assert packages == set(LEVEL)


def test_an_upward_import_would_be_found(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(
        "def f():\n    from headstart.cli.main import main\n    import headstart.heads.x\n"
    )
    assert imported_packages(file) == {"cli", "heads"}


def test_heavy_libraries_are_imported_only_inside_functions() -> None:
    for path in [path for path in FILES if owner(path) not in TORCH_PACKAGES]:
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in getattr(node, "names", [])]
            module = getattr(node, "module", None) or ""
            for name in [module, *names] if isinstance(node, ast.Import | ast.ImportFrom) else []:
                assert name.split(".")[0] not in ("torch", "transformers", "numpy"), path
