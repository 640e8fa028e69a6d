"""Holds the tables of families and launch flags against the sources of other projects.

    python scripts/upstream_check.py --trees DIR --release vllm=0.28.0 --out FILE.md

DIR holds source trees called vllm, sglang, transformers and llama.cpp; those that are absent are
left out. Their files are read as text and never run. With --release, what our tables date later
than that release is not missed in the tree. Every difference is listed with the place to look at,
and apart those that are known and have a reason (`EXPLAINED`).
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from headstart.families.base import Family
from headstart.families.drafters import DFLASH, DSPARK
from headstart.families.registry import GRAFTED_AS, WITHOUT_HEAD, families
from headstart.families.versions import MAIN, is_at_least

ROOT = Path(__file__).parents[1]
_CLASS = re.compile(r"\w+(?:For(?:CausalLM|ConditionalGeneration)|_Reasoning_V3)$")
# engine -> file with its mapping of types, folders with loaders, files with flags, our adapter
_ENGINES = {
    "vllm": (
        "vllm/config/speculative.py", ("vllm/model_executor/models", "vllm/models"),
        ("vllm/engine/arg_utils.py",), "vllm.py",
    ),
    "sglang": (
        "python/sglang/srt/configs/model_config.py", ("python/sglang/srt/models",),
        ("python/sglang/srt/server_args.py", "python/sglang/srt/arg_groups/*.py"), "sglang.py",
    ),
}  # fmt: skip
# family -> how its loader is called there, where the family's name does not tell
_LOADERS = {
    "deepseek_v3": "deepseek", "deepseek_v32": "deepseek", "glm_moe_dsa": "deepseek",
    "pangu_ultra_moe": "deepseek", "bailing_moe": "bailing_moe", "bailing_moe_v3": "bailing_moe",
    "qwen3_5_moe": "qwen3_5", "intern_s2": "qwen3_5", "ernie4_5_moe": "ernie",
    "hy_v3": "hunyuan_v3|hy_v3", "dots3_note": "dots3", "gemma4_assistant": "gemma4",
    "glm5_next": "glm5next|glm5_next", "hy_v4": "hunyuan_v4|hy_v4", "gigachat3_5": "gigachat35",
}  # fmt: skip
_ONE = ("is not read", "SGLang runs one module of it, whatever the config counts")
# (tree, what it is about) -> words of the difference, and why it stays
EXPLAINED = {
    ("vllm", "medusa"): ("drafting class", "another method"),
    ("vllm", "mlp_speculator"): ("drafting class", "another method"),
    ("vllm", "qwen3_omni_moe"): ("drafting class", "a target of EAGLE drafts"),
    ("sglang", "qwen4_exp"): _ONE,
    ("sglang", "qwen3_5"): _ONE,
    ("sglang", "qwen3_5_moe"): _ONE,
    ("sglang", "intern_s2"): _ONE,
    ("sglang", "--enable-ep-moe"): ("not an option", "written for releases before 0.5.1 only"),
    ("transformers", "olmo_hybrid"): ("ignores mtp", "inherited from Qwen3-Next's class"),
    ("transformers", "granite_docling"): ("ignores mtp", "no engine reads a head of it yet"),
    ("llama.cpp", "deepseek_v4"): ("we say no", "its head is not read from GGUF files here"),
    ("llama.cpp", "dots3_note"): ("we say no", "converted, and no graph drafts with it"),
    ("llama.cpp", "mimo_v2"): ("exports no head", "converted without a switch of its own"),
    ("llama.cpp", "DeepseekV4DSparkModel"): ("exports a head", "DSpark, which is no head"),
    ("llama.cpp", "MiniCPMV4_6ForConditionalGeneration"): ("exports a head", "as Qwen3.5's"),
}


@dataclass(frozen=True)
class Difference:
    tree: str
    about: str  # a family, or what it is of theirs
    text: str
    place: str


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


@cache
def _constants(path: Path) -> frozenset[str]:
    """Every string of a Python file."""
    nodes = ast.walk(ast.parse(_text(path)))
    return frozenset(n.value for n in nodes if isinstance(n, ast.Constant) and type(n.value) is str)


def _compared(path: Path, attribute: str) -> set[str]:
    """Strings that an attribute called so is compared with."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(_text(path))):
        if isinstance(node, ast.Compare) and attribute in ast.unparse(node.left):
            for part in node.comparators:
                inner = ast.walk(part)
                found |= {
                    n.value for n in inner if isinstance(n, ast.Constant) and type(n.value) is str
                }
    return found


def _names(family: Family) -> set[str]:
    return {*family.model_types, *family.marked_types, *family.architectures}


def _known() -> set[str]:
    names = {name for family in families() for name in (family.name, *_names(family))}
    return names | {*GRAFTED_AS, *WITHOUT_HEAD, *DSPARK.types, *DFLASH.types}


def _served(engine: str, release: str) -> list[Family]:
    """Families whose head the engine served at that release, as our tables say."""
    found = []
    for family in families():
        since = family.served.get(engine, "").split(" ")[0]
        if since and is_at_least(release, since):
            found.append(family)
    return found


def check_types(engine: str, tree: Path, release: str) -> Iterator[Difference]:
    """Types and classes that the engine turns into a drafting class, and those that we list."""
    file = _ENGINES[engine][0]
    path = tree / file
    constants = _constants(path)
    for family in _served(engine, release):
        if family.name != "gemma4_assistant" and not constants & _names(family):
            yield Difference(engine, family.name, "no type or class of it is named there", file)
    if engine == "vllm":
        theirs = {t for t in _compared(path, "model_type") if not t.endswith("_mtp")}
    else:
        theirs = {name for name in constants if _CLASS.match(name)} & _drafted(path)
    for name in sorted(theirs - _known()):
        yield Difference(
            engine, name, "is given a drafting class and unknown to our registry", file
        )


def _drafted(path: Path) -> set[str]:
    """Classes that are named where a draft's architecture is chosen."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(_text(path))):
        if isinstance(node, ast.FunctionDef) and "draft" in node.name:
            inner = ast.walk(node)
            found |= {
                n.value for n in inner if isinstance(n, ast.Constant) and type(n.value) is str
            }
    return found


def _loaders(engine: str, tree: Path, family: Family) -> list[Path]:
    wanted = re.compile(_LOADERS.get(family.name, re.escape(family.name)))
    folders = [tree / folder for folder in _ENGINES[engine][1]]
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    drafting = [p for p in files if re.search(r"mtp|nextn|eagle", p.name)]
    drafting += [p for p in files if p not in drafting and f"{wanted.pattern}.py" == p.name]
    return [path for path in drafting if wanted.search(str(path.relative_to(tree)))]


def fragments(family: Family) -> list[str]:
    """What the published names of a head have of their own: `enorm`, `shared_head.norm`."""
    found = []
    for published in family.keys.pairs:
        below = re.split(r"\{(?:layer|module|last)\}\.", published)[-1]
        word = below.split("{")[0].strip(".")
        if word and "." not in word.removeprefix("mtp."):
            found.append(word.removeprefix("mtp."))
    return [word for word in dict.fromkeys(found) if word not in ("embed_tokens", "mtp", "head")]


def check_loaders(engine: str, tree: Path, release: str) -> Iterator[Difference]:
    """Names of our tables, and the field with the count, in the engine's loader of the family."""
    for family in _served(engine, release):
        paths = _loaders(engine, tree, family)
        if not paths:
            yield Difference(
                engine, family.name, "no loader was found for it", _ENGINES[engine][1][0]
            )
            continue
        text = "\n".join(_text(path) for path in paths)
        where = str(paths[0].relative_to(tree))
        for word in fragments(family):
            if word not in text:
                yield Difference(engine, family.name, f"{word} is not in the loader", where)
        field = (family.count_field or "").split(".")[-1]
        config = _text(tree / _ENGINES[engine][0])
        if field and field not in text and field not in config:
            yield Difference(engine, family.name, f"the count {field} is not read", where)


def check_flags(engine: str, tree: Path) -> Iterator[Difference]:
    """Flags that `launch` writes, whatever the version, among those that the tree knows."""
    _, _, globs, adapter = _ENGINES[engine]
    known = "\n".join(_text(path) for glob in globs for path in sorted(tree.glob(glob)))
    for flag in sorted(_constants(ROOT / "headstart/launch" / adapter)):
        is_flag = re.fullmatch(r"--[a-z][a-z-]+", flag) is not None
        field = flag.removeprefix("--no-").removeprefix("--").replace("-", "_")
        if is_flag and flag not in known and not re.search(rf"\b{field}\b", known):
            yield Difference(engine, flag, "is not an option of this tree", globs[0])


def check_transformers(tree: Path) -> Iterator[Difference]:
    """Models whose classes pass over head tensors, or count modules, and that we do not know."""
    for path in sorted((tree / "transformers/models").glob("*/m*_*.py")):
        kind = path.parent.name
        ignored = re.search(r"_keys_to_ignore_on_load_unexpected = .*mtp", _text(path))
        if ignored and path.name == f"modeling_{kind}.py" and kind not in _known():
            place = str(path.relative_to(tree))
            yield Difference(
                "transformers", kind, "ignores mtp tensors and is unknown to us", place
            )


def check_llama_cpp(tree: Path) -> Iterator[Difference]:
    """Architectures whose head the converter takes out, and our first builds that draft with it."""
    classes: dict[str, tuple[list[str], bool, list[str], str]] = {}
    for path in sorted((tree / "conversion").glob("*.py")):
        for node in ast.walk(ast.parse(_text(path))):
            if isinstance(node, ast.ClassDef):
                body = [ast.unparse(line) for line in node.body]
                registered = [
                    str(argument.value)
                    for call in node.decorator_list
                    if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(".register")
                    for argument in call.args
                    if isinstance(argument, ast.Constant)
                ]
                bases = [ast.unparse(base).split(".")[-1] for base in node.bases]
                has = any(line.startswith("supports_mtp_export = True") for line in body)
                classes[node.name] = (bases, has, registered, str(path.relative_to(tree)))

    def exports(name: str) -> bool:
        bases, has, _, _ = classes.get(name, ([], False, [], ""))
        return has or any(exports(base) for base in bases)

    places = {arch: c[3] for name, c in classes.items() if exports(name) for arch in c[2]}
    ours = {arch: family for family in families() for arch in family.architectures}
    for arch, place in sorted(places.items()):
        family = ours.get(arch)
        if family is None and arch not in _known():
            yield Difference("llama.cpp", arch, "exports a head and is unknown to us", place)
        elif family is not None and "llamacpp" not in family.served:
            yield Difference(
                "llama.cpp", family.name, f"exports the head of {arch}; we say no", place
            )
    for family in families():
        since = family.served.get("llamacpp", "").partition(" ")[0]
        if since and places and not set(family.architectures) & set(places):
            text = f"drafts from {since} by our table, and exports no head"
            yield Difference("llama.cpp", family.name, text, "conversion")


def differences(trees: Path, releases: dict[str, str]) -> Iterator[Difference]:
    for engine in _ENGINES:
        tree, release = trees / engine, releases.get(engine, MAIN)
        if tree.is_dir():
            yield from check_types(engine, tree, release)
            yield from check_loaders(engine, tree, release)
            yield from check_flags(engine, tree)
    if (trees / "transformers").is_dir():
        yield from check_transformers(trees / "transformers")
    if (trees / "llama.cpp").is_dir():
        yield from check_llama_cpp(trees / "llama.cpp")


def report(found: list[Difference]) -> str:
    """Differences without a reason first, then those that have one."""
    known = [d for d in found if _reason(d)]
    lines = [f"{len(found) - len(known)} differences are open.", ""]
    lines += ["| tree | about | difference | place |", "|---|---|---|---|"]
    lines += [_row(d) for d in found if d not in known]
    lines += ["", f"{len(known)} are explained.", ""]
    lines += ["| tree | about | difference | place | why |", "|---|---|---|---|---|"]
    lines += [f"{_row(d)} {_reason(d)} |" for d in known]
    return "\n".join(lines) + "\n"


def _reason(found: Difference) -> str:
    """Why a difference stays; empty where no reason is given."""
    words, why = EXPLAINED.get((found.tree, found.about), ("", ""))
    return why if words in found.text else ""


def _row(found: Difference) -> str:
    return f"| {found.tree} | `{found.about}` | {found.text} | `{found.place}` |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trees", type=Path, required=True, help="folder with the source trees")
    parser.add_argument("--release", action="append", default=[], help="NAME=VERSION of a tree")
    parser.add_argument("--out", type=Path, help="write the list there, not to the terminal")
    given = parser.parse_args()
    releases = dict(entry.split("=", 1) for entry in given.release)
    text = report(list(differences(given.trees, releases)))
    if given.out is None:
        print(text, end="")
    else:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
