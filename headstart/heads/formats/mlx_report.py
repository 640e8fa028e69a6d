"""What can be said about a model that MLX converted, and a head in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headstart.checkpoint.config import Config
from headstart.checkpoint.reader import Checkpoint
from headstart.errors import HeadstartError, some
from headstart.families.base import Family
from headstart.families.dims import dims, size
from headstart.heads.detection import State, declared_count, find_family, lacking, quoted
from headstart.heads.formats import count_modules
from headstart.heads.formats.mlx_drafters import DRAFTERS
from headstart.heads.formats.mlx_model import (
    SUB_FILE,
    TRAP,
    TRAP_TYPES,
    head_tensors,
    spelled_in_model,
)
from headstart.heads.formats.mlx_spelling import SpelledMlx, unspell_mlx
from headstart.heads.inspection import (
    HeadReport,
    Report,
    TrunkReport,
    main_dtype,
    sampling_settings,
)
from headstart.heads.operation import counted
from headstart.heads.sharing import Sharing

_KV_BYTES = 2
_SHARES: dict[str, Sharing] = {"embed_tokens": "from the trunk", "lm_head": "from the trunk"}


def inspect_mlx(checkpoint: Checkpoint, model_type: str | None = None) -> Report:
    owner = find_family(checkpoint, model_type)
    infos = head_tensors(checkpoint)
    trunk = [info for name, info in checkpoint.tensors.items() if name not in infos]
    spelled = spelled_in_model(checkpoint)
    modules, missing, fault = _content(checkpoint, owner, spelled)
    declared = declared_count(checkpoint.config)
    state: State
    if not infos:
        state = "declared-but-missing" if declared else "absent"
    elif missing or fault:
        state = "partial"
    else:
        state = "complete" if declared else "undeclared"
    known, config = dims(checkpoint.config.fields), checkpoint.config
    elements = size(owner.kv_elements, dims(owner.fields_of_head(config.fields))) if owner else 0
    return Report(
        checkpoint.folder,
        owner,
        config.model_type,
        config.architectures,
        TrunkReport(
            known.get("layers"), known.get("hidden"), known.get("vocab"), len(trunk),
            sum(info.num_bytes for info in trunk), main_dtype(trunk), _bits(config),
            bool(config.get("tie_word_embeddings")),
        ),
        HeadReport(
            state, declared, modules, len(infos), missing,
            sum(info.num_bytes for info in infos.values()), main_dtype(list(infos.values())),
            _SHARES if infos else {}, (elements or 0) * _KV_BYTES * modules,
            "stacked" if any("switch_mlp" in name for name in infos) else "",
            root=_root(infos), is_quantized=spelled.is_quantized,
            outside=_outside(checkpoint),
        ),
        sampling_settings(checkpoint),
        tuple(_warnings(checkpoint, owner, state, missing, fault)),
        config.raw,
        format="mlx",
        facts=_facts(checkpoint, spelled),
    )  # fmt: skip


def _content(
    checkpoint: Checkpoint, owner: Family | None, spelled: SpelledMlx
) -> tuple[int, tuple[str, ...], str]:
    """Modules, what is missing under our names, and why the head cannot be read at all."""
    if owner is None or owner.name not in DRAFTERS or not spelled.tensors:
        return 0, (), ""
    try:
        tensors, _ = unspell_mlx(spelled, owner, checkpoint.folder)
    except HeadstartError as error:
        return 0, (), str(error)
    modules = count_modules(tensors)
    fields = checkpoint.config.fields
    return modules, tuple(lacking(owner, fields, max(modules, 1), tensors)), ""


def _bits(config: Config) -> str:
    found = config.get("quantization")
    if not isinstance(found, dict):
        return ""
    return f"{found.get('mode', 'affine')}, {found.get('bits')} bits"[:60]


def _files(checkpoint: Checkpoint) -> list[str]:
    """The files that hold the head, below the folder."""
    paths = {info.file for info in head_tensors(checkpoint).values()}
    return sorted(path.relative_to(checkpoint.folder).as_posix() for path in paths)


def _outside(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Those of them that the index does not list."""
    index = checkpoint.index
    listed = set(index.metadata) - set(index.unlisted)
    return tuple(name for name in _files(checkpoint) if name not in listed)


def _root(names: Iterable[str]) -> str:
    """What stands before `mtp.` in the names."""
    first = next(iter(names), "mtp.")
    return first.partition("mtp.")[0]


def _facts(checkpoint: Checkpoint, spelled: SpelledMlx) -> dict[str, str]:
    facts = {"MLX": f"converted, {counted(len(checkpoint.index.metadata), 'file')}"}
    if spelled.tensors:
        where = some(_files(checkpoint))
        norms = "as published" if spelled.is_raw else "1 + w"
        kind = "quantised" if spelled.is_quantized else "not quantised"
        facts["head in"] = f"{where}; {kind}; norms {norms}"
    return facts


def _warnings(
    checkpoint: Checkpoint,
    owner: Family | None,
    state: State,
    missing: tuple[str, ...],
    fault: str,
) -> Iterator[str]:
    restore = f"headstart restore {quoted(checkpoint.folder)} --from ORIGINAL --out DIR"
    infos = head_tensors(checkpoint)
    if state == "declared-but-missing":
        yield f"the config declares a head that MLX dropped. Give it back: {restore}"
    if missing:
        yield f"the head is not whole: {some(missing)}. {restore}"
    if fault:
        yield fault
    if infos and (owner is None or owner.name not in DRAFTERS):
        yield f"how MLX stores such heads is not known here; known are {', '.join(DRAFTERS)}"
    is_seen = any(info.file.name.startswith("model") for info in infos.values())
    if is_seen and owner is not None and owner.name in TRAP_TYPES:
        yield f"{TRAP}. `headstart stitch` of the model with itself moves the head out of there"
    if (checkpoint.folder / SUB_FILE).is_file() and not all(
        info.file == checkpoint.folder / SUB_FILE for info in infos.values()
    ):
        yield f"there is another head in {SUB_FILE}, which vllm-mlx takes first"
