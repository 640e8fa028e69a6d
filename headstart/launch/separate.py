"""A head given with --head: does it belong to the model, and can the engine read its format.

A path that does not exist here may exist where the engine runs, so it is a warning, not an error.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.checkpoint.config import Config, read_json_object
from headstart.checkpoint.reader import Checkpoint
from headstart.errors import LaunchError
from headstart.families.base import Family
from headstart.families.dims import dims
from headstart.families.drafters import of_config
from headstart.families.engines import ENGINE_TITLES
from headstart.families.registry import family, match_family
from headstart.heads.formats import format_of, open_any, open_head
from headstart.heads.formats.vllm import FAMILIES as VLLM_FAMILIES
from headstart.heads.formats.vllm import architecture_of
from headstart.heads.head import config_fields
from headstart.heads.inspection import Report

_ASSISTANT = "gemma4_assistant"
# engine -> formats it reads; None is a full checkpoint under the model's own tensor names
_READS: dict[str, tuple[str | None, ...]] = {
    "vllm": ("vllm", None),
    "sglang": ("sglang", None),
    "trtllm": ("trtllm", None),
    "xllm": ("xllm",),
    "llamacpp": ("gguf",),
    "mlx": ("mlx",),
}


@dataclass(frozen=True)
class SeparateHead:
    family: Family
    num_modules: int
    num_bytes: int
    is_quantized: bool
    root: str = ""  # prefix of the names of its tensors, as they are stored
    architecture: str = ""  # the class that runs it, of a folder in vLLM's format


def separate_head(engine: str, path: Path | None, report: Report) -> SeparateHead | None:
    """What is in the folder, checked against model and engine; None if there is no such folder."""
    if path is None or not path.exists():
        return None
    _refuse_other_drafts(path)
    checkpoint = open_any(path)
    if _family_of(checkpoint.config.raw) is family(_ASSISTANT):
        return _assistant(checkpoint, report)
    head = open_head(path)
    if report.family is not None and head.family is not report.family:
        raise LaunchError(
            f"--head: {path} is a head of {head.family.title} ({head.family.name}), and "
            f"{report.path} is a model of {report.family.title} ({report.family.name}). Give a "
            "head that was trained with this model."
        )
    hidden = dims(config_fields(head.config)).get("hidden")
    if None not in (hidden, report.trunk.hidden_size) and hidden != report.trunk.hidden_size:
        raise LaunchError(
            f"--head: {path} has hidden size {hidden}, and {report.path} has "
            f"{report.trunk.hidden_size}. Give a head that was trained with this model."
        )
    found = format_of(checkpoint)
    _require_format(engine, path, found, report, head.family)
    root = head.root if found is None else ""  # formats for engines have names that these read
    return SeparateHead(
        head.family, head.num_modules, head.num_bytes, head.is_quantized, root,
        architecture_of(checkpoint.config.raw) or "",
    )  # fmt: skip


def _assistant(checkpoint: Checkpoint, report: Report) -> SeparateHead:
    """A Gemma 4 assistant is a small model of its own, with a hidden size of its own."""
    if not report.model_type.startswith("gemma4"):
        raise LaunchError(
            f"--head: {checkpoint.folder} is an assistant of Gemma 4, and {report.path} is "
            f"{report.model_type or 'of an unknown type'}. Give it to a Gemma 4 model."
        )
    total = sum(info.num_bytes for info in checkpoint.tensors.values())
    return SeparateHead(family(_ASSISTANT), 1, total, is_quantized=False)


def _require_format(
    engine: str, path: Path, found: str | None, report: Report, owner: Family
) -> None:
    if found in _READS[engine]:
        return
    head, model = shlex.quote(str(path)), shlex.quote(str(report.path))
    what = "a full checkpoint" if found is None else f"a head in {found} format"
    if engine == "xllm":
        verb, flag = ("export", "--format") if found is None else ("convert", "--to")
        reads = "xllm format"
        advice = f"`headstart {verb} {head} {flag} xllm --out DIR` makes one: use --head DIR."
    elif engine == "llamacpp":
        reads = "a GGUF file with a head alone"
        advice = (
            f"`headstart export {head} --format gguf --trunk {model} --out DIR` makes one: use "
            "--head DIR/mtp-*.gguf."
        )
    elif engine == "mlx":
        reads = "a drafter folder"
        verb, flag = ("export", "--format") if found is None else ("convert", "--to")
        advice = f"`headstart {verb} {head} {flag} mlx --out DIR` makes one: use --head DIR."
    elif engine == "sglang":
        reads = "sglang format or a full checkpoint"
        advice = f"`headstart convert {head} --to sglang --out DIR` makes one: use --head DIR."
    elif engine == "vllm" and owner.name in VLLM_FAMILIES:
        reads = "vllm format or a full checkpoint with the model's own tensor names"
        advice = f"`headstart convert {head} --to vllm --out DIR` makes one: use --head DIR."
    else:
        reads = "a full checkpoint with the model's own tensor names"
        reads += " or trtllm format" if engine == "trtllm" else ""
        advice = f"Run `headstart stitch {head} {model} --out DIR` and launch DIR without --head."
    raise LaunchError(f"--head: {path} is {what}; {ENGINE_TITLES[engine]} reads {reads}. {advice}")


def _refuse_other_drafts(path: Path) -> None:
    """LaunchError for drafts of another kind, which our formats would not recognise."""
    file = path / "config.json"
    if not file.is_file():
        return
    config = read_json_object(file)
    if (other := of_config(config, Config(config).fields)) is not None:
        raise LaunchError(
            f"--head: {path} is a {other[0].name} drafter ({other[1]}); expected an MTP head. "
            "Start the engine directly: `headstart inspect` says with which flags."
        )
    keys = ("architectures", "model_type", "speculators_model_type")
    names = " ".join(str(config.get(key, "")) for key in keys).lower()
    if "eagle" in names or "medusa" in names:
        raise LaunchError(
            f"--head: {path} is an EAGLE or Medusa draft ({names.strip()}); expected an MTP head. "
            "One server has one drafter: see docs/migrating.md for the change, or start the engine "
            "directly."
        )


def _family_of(config: dict[str, Any]) -> Family | None:
    return match_family(
        config, [str(config.get("model_type", ""))], config.get("architectures") or []
    )
