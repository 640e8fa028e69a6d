"""A head as GGUF files have it, made of ours and turned back.

Both directions go by the tables of `archs.py`. What GGUF has no place for (dtypes, whether experts
were fused, the prefix of published names) is kept in one more key of the file, `headstart.head`,
which llama.cpp passes over; a file without it is read by rules that are said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headstart.checkpoint.dtypes import GGUF_TYPES
from headstart.checkpoint.gguf.encoding import PLAIN, QUANTIZED
from headstart.checkpoint.gguf.quantize_tool import TOOL, TYPES, require_tool
from headstart.checkpoint.gguf.values import cast, floats_of, regrouped, shifted
from headstart.checkpoint.quantized.names import is_scale
from headstart.checkpoint.source import TensorSource
from headstart.errors import (
    ConfigError,
    ShapeMismatch,
    UnexpectedTensor,
    UnsupportedFamily,
    some,
)
from headstart.families.dims import dims
from headstart.heads.experts import has_fused_experts, split_experts, stack_experts
from headstart.heads.formats.gguf.arch import Arch
from headstart.heads.formats.gguf.archs import arch_of, reason_against
from headstart.heads.head import Head, config_fields, dequantize
from headstart.heads.latent import split_kv_b

RECORD = "headstart.head"  # the key that holds what GGUF has no place for
_ROUTERS = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "indexer.proj.weight")
_MAX_SMALL = 10_000  # in one norm: more would be a file of their own
_ROLES = ("embed_norm", "hidden_norm", "fuse", "out_norm")


@dataclass(frozen=True)
class SpelledHead:
    """Tensors by module and name below `blk.{L+module}.`, and what a file says about them."""

    arch: Arch
    tensors: Mapping[tuple[int, str], TensorSource]
    num_modules: int
    num_layers: int  # of the trunk that it belongs to
    head_dim: int  # of its attention, 0 where unknown
    # key below the architecture's name -> one value for each module
    layer_values: Mapping[str, list[Any]] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)
    changes: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(source.num_bytes for source in self.tensors.values())


def require_arch(family_name: str, title: str) -> Arch:
    found = arch_of(family_name)
    if found is None:
        reason = reason_against(family_name)
        raise UnsupportedFamily(
            f"heads of {title} ({family_name}) cannot be stored as GGUF: {reason}. Other formats: "
            "`headstart families`."
        )
    return found


def spell(head: Head, kind: str | None = None) -> SpelledHead:
    """The head as llama.cpp's converter writes it; `kind`: the type of its matrices."""
    arch = require_arch(head.family.name, head.family.title)
    count = _num_modules(head)
    if arch.max_modules is not None and count > arch.max_modules:
        raise UnsupportedFamily(
            f"llama.cpp runs {arch.max_modules} module of {head.family.title}; this head has "
            f"{count}."
        )
    record = _record(head, arch)
    head = dequantize(head)
    fields = head.family.fields_of_head(config_fields(head.config))
    tensors: dict[tuple[int, str], TensorSource] = {}
    for module in range(count):
        own = _of_module(head.tensors, module, arch)
        for name, source in _spelled(own, arch, fields).items():
            tensors[module, name] = typed(name, source, arch, kind)
    listed = [arch.layer_values(config_fields(head.config), m) for m in range(count)]
    values = {key: [each[key] for each in listed] for key in listed[0]}
    changes = list(head.changes)
    lossy = sorted({s.dtype for s in tensors.values() if s.dtype not in PLAIN})
    if lossy:
        changes.append(f"matrices are quantised to {' and '.join(lossy)}, which cannot be undone")
    changes += _kept(tensors, kind)
    return SpelledHead(
        arch, tensors, count, head.naming().num_layers, dims(fields).get("head_dim", 0),
        values, record, tuple(changes),
    )  # fmt: skip


def _num_modules(head: Head) -> int:
    """Modules that have a block, also where all share one fusion."""
    numbers = [int(name.split(".")[1]) for name in head.tensors if name.startswith("modules.")]
    return max([head.num_modules - 1, *numbers]) + 1


def retyped(spelled: SpelledHead, kind: str | None) -> SpelledHead:
    """The same head with its matrices in another type."""
    if kind is None:
        return spelled
    tensors = {
        place: typed(place[1], source, None, kind) for place, source in spelled.tensors.items()
    }
    changed = {s.dtype for place, s in spelled.tensors.items() if tensors[place].dtype != s.dtype}
    said = f"matrices were {' and '.join(sorted(changed))} and are {kind} now"
    return replace(
        spelled, tensors=tensors, changes=(*((said,) if changed else ()), *_kept(tensors, kind))
    )


def _kept(tensors: Mapping[tuple[int, str], TensorSource], kind: str | None) -> list[str]:
    """That some matrices did not get the type that was asked for, in words."""
    if kind is None:
        return []
    kept = [
        name
        for (_, name), source in tensors.items()
        if source.dtype != kind and not _is_exact(name, source)
    ]
    if not kept:
        return []
    return [
        f"{some(sorted(set(kept)))}: not {kind}, whose blocks of {GGUF_TYPES[kind][1]} values do "
        "not divide a row"
    ]


def _record(head: Head, arch: Arch) -> dict[str, Any]:
    """What the way back needs: how published tensors were stored."""
    stored = split_experts(head.tensors).items()
    dtypes = {name: source.dtype for name, source in stored if not is_scale(name)}
    usual = max(set(dtypes.values()), key=list(dtypes.values()).count)
    small = _small_norms(head) if arch.shifts_norms else {}
    return {
        "family": head.family.name,
        "root": head.root,
        "experts": "fused" if has_fused_experts(head.tensors) else "per expert",
        "dtype": usual,
        "dtypes": {name: dtype for name, dtype in dtypes.items() if dtype != usual},
        "left_out": sorted(head.left_out),
        **({"small": small} if small else {}),
        **head.history,
    }


def _small_norms(head: Head) -> dict[str, list[list[float]]]:
    """Values of norms that FP32 does not keep beside 1, by place: kept apart, to be put back."""
    import numpy as np

    found: dict[str, list[list[float]]] = {}
    for name, source in head.tensors.items():
        if not name.endswith("norm.weight") or source.dtype not in PLAIN:
            continue
        if len(source.shape) != 1:
            raise ShapeMismatch(
                f"{name} has shape {list(source.shape)}; expected one value per channel. The file "
                "is damaged: download or export it again."
            )
        own = floats_of(source)
        back = floats_of(shifted(shifted(source, 1.0), -1.0, source.dtype))
        places = np.flatnonzero(own.view("<u4") != back.view("<u4"))  # -0 is not 0
        if len(places):
            found[name] = [[int(place), float(own[place])] for place in places[:_MAX_SMALL]]
    return found


def record_text(record: Mapping[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":"), sort_keys=True)


def _of_module(
    tensors: Mapping[str, TensorSource], module: int, arch: Arch
) -> dict[str, TensorSource]:
    """What belongs to one module, without the prefix; shared roles count for every one."""
    own = {}
    for name, source in tensors.items():
        prefix, number, rest = name.split(".", 2)
        is_shared = arch.shares_roles and rest.split(".")[0] in _ROLES
        if prefix == "modules" and (int(number) == module or is_shared):
            own[rest] = source
    return own


def _spelled(
    own: Mapping[str, TensorSource], arch: Arch, fields: Mapping[str, Any]
) -> dict[str, TensorSource]:
    result: dict[str, TensorSource] = {}
    for name, source in stack_experts(own).items():
        if arch.kv_b and name == f"{arch.kv_b}.weight":
            result["attn_k_b.weight"], result["attn_v_b.weight"] = split_kv_b(name, source, fields)
        else:
            result[_gguf_name(name, arch)] = source
    for name in arch.paired:
        if name in result:
            result[name] = paired(name, result[name], dims(fields).get("head_dim", 0))
    return result


def _gguf_name(name: str, arch: Arch) -> str:
    """The name below `blk.N.`: whole names first, then those of modules with `.weight`."""
    if name in arch.names:
        return arch.names[name]
    module, _, parameter = name.rpartition(".")
    if module in arch.names and parameter in ("weight", "bias"):
        return f"{arch.names[module]}.{parameter}"
    raise UnexpectedTensor(
        f"the head holds {name}, for which llama.cpp's {arch.name} has no place as far as is known "
        "here. Remove it, or keep the head in another format."
    )


def paired(name: str, source: TensorSource, head_dim: int, back: bool = False) -> TensorSource:
    """Rows of each attention head from two halves to pairs, or back."""
    rows = source.shape[0] if len(source.shape) == 2 else 0
    if not head_dim or head_dim % 2 or not rows or rows % head_dim:
        raise ConfigError(
            f"{name} has shape {list(source.shape)} and heads are {head_dim} wide; expected whole "
            "heads. Give the head with the config of its model."
        )
    half = head_dim // 2
    return regrouped(source, half, 2) if back else regrouped(source, 2, half)


def typed(name: str, source: TensorSource, arch: Arch | None, kind: str | None) -> TensorSource:
    """As llama.cpp expects it: norms, vectors and routers in FP32, matrices as asked."""
    is_norm = name.endswith("norm.weight")
    if is_norm and arch is not None and arch.shifts_norms:
        return shifted(source, 1.0)
    if _is_exact(name, source):
        return cast(source, "F32")
    wanted = kind or (source.dtype if source.dtype in PLAIN else "BF16")
    if source.shape[-1] % GGUF_TYPES[wanted][1]:  # a row is no whole number of blocks
        wanted = source.dtype if source.dtype in PLAIN else "F16"
    return cast(source, wanted)


def _is_exact(name: str, source: TensorSource) -> bool:
    """Whether llama.cpp keeps it in FP32 whatever the type of matrices."""
    is_vector = len(source.shape) <= 1 or name.endswith("norm.weight")
    return is_vector or name in _ROUTERS or not name.endswith(".weight")


def check_kind(kind: str | None) -> str | None:
    """The type that `--head-type` names, in the spelling of GGUF."""
    if kind is None:
        return None
    if kind.upper() not in (*PLAIN, *QUANTIZED, *TYPES):
        known = ", ".join([*PLAIN, *QUANTIZED]).lower()
        by_tool = ", ".join(TYPES).lower()
        raise ConfigError(
            f"--head-type is {kind[:40]!r}; expected one of {known}, or of {by_tool}, which "
            f"{TOOL} makes where it is on the path."
        )
    if kind.upper() in TYPES:
        require_tool(kind.upper())
    return kind.upper()
