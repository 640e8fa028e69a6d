"""Imports point one way only: docs/architecture.md lists the layers, this test enforces them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import headstart
from headstart.families.registry import GRAFTED_AS, WITHOUT_HEAD, families

PACKAGE = Path(headstart.__file__).parent

# Lower layers first. Packages in one layer are strangers to each other.
LAYERS = [
    {"errors", "files", "processes"},
    {"checkpoint", "families", "report", "sampling"},
    {"calibrate", "data", "vocab"},
    {"heads"},
    {"models"},
    {"backends"},
    {"simulate"},
    {"launch", "engine", "train"},
    {"bench", "distill", "server"},
    {"demo"},
    {"cli"},
]
# Computing packages, which the command line imports only when it runs a model.
TORCH_PACKAGES = {
    "sampling", "models", "backends", "simulate", "engine", "train", "server",
}  # fmt: skip
# Where a model type may be named outside of families/: files, names (None: all), reason.
NAMING_MODELS: list[tuple[str, set[str] | None, str]] = [
    ("heads/formats/", None, "formats of other projects, which are defined by model type"),
    ("launch/", None, "options of other engines, which depend on the model type"),
    ("calibrate/tiny_configs.py", None, "configs for tests: one for each model type"),
    ("calibrate/shapes.py", None, "configs of released sizes"),
    ("demo/", {"llama"}, "fields of GGUF files, which are llama.cpp's"),
    ("server/reasoning.py", {"mistral"}, "vLLM's name of a reasoning format"),
    ("server/tool_formats.py", {"deepseek_v3"}, "vLLM's name of a tool format"),
]
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


def model_names() -> set[str]:
    """Everything that a config may call a model that the registry knows."""
    known = [(f.name, *f.model_types, *f.marked_types, *f.architectures) for f in families()]
    return {name for names in known for name in names} | set(GRAFTED_AS) | set(WITHOUT_HEAD)


def literals(tree: ast.AST) -> Iterator[str]:
    """Strings of a file, parts of f-strings included, docstrings left out."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            yield str(node.value)


def named_models(source: str, names: set[str]) -> set[str]:
    """Models that the strings of a file name, as words of their own."""
    words = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    pattern = re.compile(rf"(?<![\w-])(?:{words})(?![\w-])")
    return {found for text in literals(ast.parse(source)) for found in pattern.findall(text)}


def test_nothing_outside_families_names_a_model_type() -> None:
    names, used = model_names(), set()
    found: dict[str, set[str]] = {}
    for path in FILES:
        inside = path.relative_to(PACKAGE).as_posix()
        left = set() if owner(path) == "families" else named_models(path.read_text(), names)
        for where, allowed, _ in NAMING_MODELS:
            if left and inside.startswith(where):
                used.add(where)
                left = left - (left if allowed is None else allowed)
        if left:
            found[inside] = left
    assert not found, "say it in families/ and ask the family, or give a reason in NAMING_MODELS"
    assert used == {where for where, _, _ in NAMING_MODELS}, "an exception that nothing needs"


def test_a_model_type_in_a_string_would_be_found() -> None:
    lines = (
        "def f(kind):",
        "    'A docstring may speak of mimo_v2.'",
        "    return kind == 'mimo' or f'a {kind} of llama' or 'qwen2_like' or 'qwen2-7b'",
    )
    names = {"mimo", "mimo_v2", "llama", "qwen2"}
    assert named_models("\n".join(lines), names) == {"mimo", "llama"}
