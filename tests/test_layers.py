"""Imports point one way only: docs/architecture.md lists the layers, this test enforces them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import headstart
from headstart.families.registry import GRAFTED_AS, WITHOUT_HEAD, families

PACKAGE = Path(headstart.__file__).parent

# Lower layers first. Packages in one layer do not import each other.
LAYERS = [
    {"documents", "errors", "files", "processes"},
    {"checkpoint", "copying", "families", "report", "sampling"},
    {"calibrate", "data", "vocab"},
    {"heads"},
    {"models"},
    {"backends"},
    {"simulate", "vllm_plugin"},
    {"launch", "engine", "push", "quantize", "train"},
    {"learn"},
    {"bench", "distill", "predict", "server"},
    {"demo"},
    {"doctor"},
    {"cli"},
]
# Computing packages, which the command line imports only when it runs a model.
TORCH_PACKAGES = {
    "sampling", "models", "backends", "simulate", "engine", "quantize", "train", "learn", "server",
    "vllm_plugin",
}  # fmt: skip
# Where a model type may be named outside of families/: files, names (None: all), reason.
NAMING_MODELS: list[tuple[str, set[str] | None, str]] = [
    ("heads/formats/", None, "formats of other projects, which are defined by model type"),
    ("vllm_plugin/", None, "classes of vLLM's, which are made for families"),
    ("launch/", None, "options of other engines, which depend on the model type"),
    ("calibrate/tiny_", None, "configs for tests: one for each model type"),
    ("calibrate/shapes", None, "configs of released sizes"),
    ("checkpoint/gguf/quantize_tool.py", {"llama"}, "keys of a file for llama.cpp's tool"),
    ("doctor/causes.py", {"llama"}, "issues of llama.cpp"),
    ("demo/", {"llama"}, "fields of GGUF files, which are llama.cpp's"),
    ("server/reasoning.py", {"mistral"}, "vLLM's name of a reasoning format"),
    ("server/tools/formats.py", {"deepseek_v3"}, "vLLM's name of a tool format"),
]
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}
FILES = sorted(path for path in PACKAGE.rglob("*.py"))


Import = ast.Import | ast.ImportFrom


class Facts(NamedTuple):
    """What is asked of a file: kept trees of all would be searched for garbage again and again."""

    imports: list[Import]  # wherever they stand
    at_top: list[Import]
    strings: str  # parts of f-strings included, docstrings left out; each begins a line


@cache
def facts(path: Path) -> Facts:
    tree = ast.parse(path.read_text())
    return Facts(
        [node for node in statements(tree) if isinstance(node, Import)],
        [node for node in tree.body if isinstance(node, Import)],
        "\n".join(literals(tree)),
    )


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All below a node, however deep; what is inside of expressions is left out."""
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, part, ()):
            yield child
            yield from statements(child)


def imported_packages(path: Path) -> set[str]:
    """Top-level parts of headstart that a file imports, wherever the import stands."""
    found = set()
    for node in facts(path).imports:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif node.module == "headstart":
            names = [f"headstart.{alias.name}" for alias in node.names]
        else:
            names = [node.module or ""] if node.level == 0 else []
        found |= {name.split(".")[1] for name in names if name.startswith("headstart.")}
    return {name for name in found if not name.startswith("__")}


def owner(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_files_import_only_from_layers_below_their_own() -> None:
    for path in FILES:
        package = owner(path)
        if package not in ("__init__", "__main__"):
            for other in imported_packages(path) - {package}:
                assert LEVEL[other] < LEVEL[package], f"{path}: {package} may not import {other}"


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
        for node in facts(path).at_top:
            names = [alias.name for alias in node.names]
            for name in [getattr(node, "module", None) or "", *names]:
                assert name.split(".")[0] not in ("torch", "transformers", "numpy"), path


def model_names() -> set[str]:
    """Everything that a config may call a model that the registry knows."""
    known = [(f.name, *f.model_types, *f.marked_types, *f.architectures) for f in families()]
    return {name for names in known for name in names} | set(GRAFTED_AS) | set(WITHOUT_HEAD)


def literals(tree: ast.AST) -> Iterator[str]:
    """Strings of a file, parts of f-strings included, docstrings left out."""
    docstrings = set()
    for node in ast.walk(tree):  # what holds others comes before them
        if isinstance(node, ast.Expr):
            docstrings.add(id(node.value))
        elif isinstance(node, ast.Constant) and id(node) not in docstrings:
            yield str(node.value)


def pattern_of(names: set[str]) -> re.Pattern[str]:
    """Finds those names as words of their own."""
    words = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.compile(rf"(?<![\w-])(?:{words})(?![\w-])")


def test_nothing_outside_families_names_a_model_type() -> None:
    pattern, used = pattern_of(model_names()), set()
    found: dict[str, set[str]] = {}
    for path in FILES:
        inside = path.relative_to(PACKAGE).as_posix()
        left = set() if owner(path) == "families" else {*pattern.findall(facts(path).strings)}
        for where, allowed, _ in NAMING_MODELS:
            if left and inside.startswith(where):
                used.add(where)
                left = left - (left if allowed is None else allowed)
        if left:
            found[inside] = left
    assert not found, "say it in families/ and ask the family, or give a reason in NAMING_MODELS"
    assert used == {where for where, _, _ in NAMING_MODELS}, "an exception that nothing needs"


def test_a_model_type_in_a_string_would_be_found(tmp_path: Path) -> None:
    lines = (
        "def f(kind):",
        "    'A docstring may speak of mimo_v2.'",
        "    return kind == 'mimo' or f'a {kind} of llama' or 'qwen2_like' or 'qwen2-7b'",
    )
    pattern = pattern_of({"mimo", "mimo_v2", "llama", "qwen2"})
    file = tmp_path / "x.py"
    file.write_text("\n".join(lines))
    assert {*pattern.findall(facts(file).strings)} == {"mimo", "llama"}


# What an engine may know of backends. `options` is what `base` exports, without importing torch.
SEAM = {"backends.base", "backends.select", "backends.options"}
# Modules whose functions are written in another language: LLVM's values, Triton's and numba's.
KERNELS = (
    "backends/cuda/kernels/", "backends/numba/adjusting.py", "backends/numba/calls.py",
    "backends/numba/candidates.py", "backends/numba/choice.py", "backends/numba/compiler.py",
    "backends/numba/context.py",
    "backends/numba/attention.py", "backends/numba/delta.py", "backends/numba/delta_rule.py",
    "backends/numba/eight_bit_products.py", "backends/numba/eight_bit_sums.py",
    "backends/numba/experts.py", "backends/numba/latent.py", "backends/numba/mlp.py",
    "backends/numba/passes.py", "backends/numba/routing.py",
    "backends/numba/float_products.py", "backends/numba/group_products.py",
    "backends/numba/group_sums.py", "backends/numba/layers.py", "backends/numba/losses.py",
    "backends/numba/noise.py",
    "backends/numba/products.py", "backends/numba/rows.py", "backends/numba/sampling.py",
    "backends/numba/sums.py", "backends/numba/thread_pool.py", "backends/numba/vectors.py",
)  # fmt: skip


def imported_modules(path: Path) -> set[str]:
    """Modules of headstart that a file imports, without the package's name.

    `from a.b import c` counts as a.b and as a.b.c: c may be a module.
    """
    names = []
    for node in facts(path).imports:
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return {name.removeprefix("headstart.") for name in names if name.startswith("headstart.")}


def untyped_parameters(tree: ast.AST) -> list[str]:
    """Parameters that accept anything: Any, object, or keywords that are passed through.

    Fields of a class are parameters, too, of its constructor if it is a dataclass.
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            found += [
                f"{node.name}({ast.unparse(each.target)})" for each in fields
                if takes_anything(each.annotation)
            ]  # fmt: skip
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        given = node.args
        optional = [one for one in (given.vararg, given.kwarg) if one is not None]
        for each in [*given.posonlyargs, *given.args, *given.kwonlyargs, *optional]:
            is_bare = each.annotation is None and each.arg not in ("self", "cls")
            if is_bare or takes_anything(each.annotation):
                found.append(f"{node.name}({each.arg})")
    return found


def takes_anything(annotation: ast.expr | None) -> bool:
    parts = [] if annotation is None else ast.walk(annotation)
    return bool({part.id for part in parts if isinstance(part, ast.Name)} & {"Any", "object"})


def beyond_the_seam(path: Path) -> set[str]:
    """Modules of backends that a file imports, and names in them, which an engine may not know."""
    found = {name for name in imported_modules(path) if f"{name}.".startswith("backends.")}
    return {
        name
        for name in found - {"backends"}
        if not f"{name}.".startswith(tuple(f"{s}." for s in SEAM))
    }


def test_the_engine_knows_backends_by_their_seam_alone() -> None:
    for path in (PACKAGE / "engine").rglob("*.py"):
        assert not beyond_the_seam(path), path.relative_to(PACKAGE)


def test_an_import_beyond_the_seam_would_be_found(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    lines = (
        "from headstart.backends.base import Backend", "from headstart.backends import cuda",
        "import headstart.backends.numba.forward", "from headstart.backends.rows import Batch",
    )  # fmt: skip
    file.write_text("\n".join(lines))
    wanted = {"cuda", "numba.forward", "rows", "rows.Batch"}
    assert beyond_the_seam(file) == {f"backends.{name}" for name in wanted}


@pytest.mark.parametrize("package", ["engine", "backends"])
def test_parameters_say_what_they_take(package: str) -> None:
    for path in (PACKAGE / package).rglob("*.py"):
        inside = path.relative_to(PACKAGE).as_posix()
        if not inside.startswith(KERNELS):
            assert untyped_parameters(ast.parse(path.read_text())) == [], inside


def test_a_parameter_that_takes_anything_would_be_found() -> None:
    source = "def f(self, a: int, *b: Any, c: dict[str, object], **d: str): ...\ndef g(e): ..."
    source += "\nclass H:\n    i: int\n    j: list[Any]"
    assert sorted(untyped_parameters(ast.parse(source))) == ["H(j)", "f(b)", "f(c)", "g(e)"]
