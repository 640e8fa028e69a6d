"""Everything that can be said about a GGUF file and its head from its header alone.

What llama.cpp can do with it is said with the build it needs; every known way in which such a file
does not load, or drafts nothing, is a warning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from headstart.checkpoint.gguf.fields import ARRAY
from headstart.checkpoint.header import TensorInfo
from headstart.errors import some
from headstart.families.dims import dims, size
from headstart.families.registry import family
from headstart.heads.detection import quoted
from headstart.heads.formats.gguf.arch import PER_LAYER, SHARED
from headstart.heads.formats.gguf.found import FoundGguf, find_gguf_head
from headstart.heads.formats.gguf.model import GgufModel
from headstart.heads.formats.gguf.reduced import BUILD, MAP
from headstart.heads.inspection import HeadReport, Report, TrunkReport
from headstart.heads.operation import counted, megabytes
from headstart.heads.sharing import Sharing

_KV_BYTES = 2  # llama.cpp keeps K/V in F16 unless set otherwise
_COARSE = ("IQ1", "IQ2", "IQ3")


def inspect_gguf(model: GgufModel) -> Report:
    found = find_gguf_head(model)
    owner = family(found.arch.family) if found.arch else None
    if found.arch and found.arch.is_shared and not found.blocks and not found.declared:
        owner = None
    own = {name: model.tensors[name] for name in found.names}
    trunk = [info for name, info in model.tensors.items() if name not in own]
    known = dims(model.config.fields)
    fields = model.config.fields
    elements = size(owner.kv_elements, dims(owner.fields_of_head(fields))) if owner else None
    return Report(
        model.folder,
        owner,
        model.arch_name,
        (),
        TrunkReport(
            found.num_layers, known.get("hidden"), known.get("vocab"), len(trunk),
            sum(info.num_bytes for info in trunk), _types(trunk), "",
            "output.weight" not in model.tensors,
        ),
        HeadReport(
            found.state, found.declared, len(found.blocks), len(own), found.missing,
            sum(info.num_bytes for info in own.values()), _types(own.values()),
            _sharing(own) if own else {}, (elements or 0) * _KV_BYTES * len(found.blocks),
            "stacked" if any("_exps." in name for name in own) else "",
        ),
        {},
        tuple(_warnings(found)),
        model.config.raw,
        format="gguf",
        facts=_facts(found),
        is_head_alone=found.is_head_only,
    )  # fmt: skip


def _types(infos: Iterable[TensorInfo]) -> str:
    """The types that hold most bytes, first the most: `Q4_K, Q6_K, F32`."""
    weight: Counter[str] = Counter()
    for info in infos:
        weight[info.dtype] += info.num_bytes
    return ", ".join(kind for kind, _ in weight.most_common(3))


def _sharing(own: dict[str, TensorInfo]) -> dict[str, Sharing]:
    stored = {"embed_tokens": "nextn.embed_tokens", "lm_head": "nextn.shared_head_head"}
    return {
        role: "own" if any(f".{name}." in each for each in own) else "from the trunk"
        for role, name in stored.items()
    }


def _facts(found: FoundGguf) -> dict[str, str]:
    model = found.model
    files = counted(len(model.headers), "file")
    total = sum(info.num_bytes for info in model.tensors.values())
    kind = "a head alone" if found.is_head_only else "a model"
    facts = {
        "GGUF": f"{kind}, {files}, {counted(len(model.tensors), 'tensor')}, {megabytes(total)}"
    }
    if found.arch is None:
        facts["llama.cpp"] = f"no head of {model.arch_name} is known"
    elif found.arch.drafts_since is None:
        facts["llama.cpp"] = f"stores heads of {model.arch_name} and does not draft with them"
    else:
        facts["llama.cpp"] = (
            f"drafts with heads of {model.arch_name} since {found.arch.drafts_since}"
        )
    return facts


def _warnings(found: FoundGguf) -> Iterator[str]:
    model, arch = found.model, found.arch
    name = model.arch_name
    restore = f"headstart restore {quoted(model.folder)} --from ORIGINAL --out DIR"
    if found.state == "declared-but-missing":
        if arch is not None and not arch.tolerates_missing:
            yield (
                f"the file declares {counted(found.declared or 0, 'module')} and holds none: "
                f"llama.cpp does not load such files of {name}. {restore}"
            )
        else:
            yield f"the file declares a head and holds none, so llama.cpp cannot draft. {restore}"
    if found.state == "undeclared":
        yield (
            f"{name}.nextn_predict_layers is missing, so llama.cpp takes the head's blocks for "
            "layers of the trunk. Stitch the head again."
        )
    if found.state == "partial":
        yield f"the head is not whole: {some(found.missing)}. {restore}"
    if found.blocks and found.blocks[0] != found.num_layers:
        yield (
            f"the head's blocks start at blk.{found.blocks[0]}; llama.cpp looks for "
            f"blk.{found.num_layers} and does not load the file. Export it again with "
            "--format gguf, which numbers them anew."
        )
    yield from _head_only(found)
    yield from _arrays(found)
    coarse = sorted({i.dtype for n, i in model.tensors.items() if n in set(found.names)
                     and i.dtype.startswith(_COARSE)})  # fmt: skip
    if coarse:
        yield (
            f"the head is stored as {' and '.join(coarse)}: llama-imatrix never runs heads, so no "
            "importance matrix helped, and acceptance may be close to none. Take Q8_0: "
            "headstart stitch with --head-type q8_0."
        )
    listed = model.tensors.get(MAP)
    if listed is not None:
        yield (
            f"the file has a draft vocabulary (d2t) of {listed.shape[0]} tokens, which needs "
            f"{BUILD}; others refuse the file"
        )
    if arch is not None and found.blocks:
        if arch.max_modules is not None and len(found.blocks) > arch.max_modules:
            count = len(found.blocks)
            yield f"llama.cpp runs {arch.max_modules} module of {name}, and this has {count}"
        if arch.caution:
            yield f"llama.cpp: {arch.caution}"


def _head_only(found: FoundGguf) -> Iterator[str]:
    if not found.is_head_only:
        return
    model = found.model
    borrows = model.value(SHARED) is True
    for needed in ("token_embd.weight", "output_norm.weight"):
        if needed in model.tensors:
            continue
        if borrows:
            yield f"{needed} is borrowed from the target ({SHARED}), which few builds can do"
        else:
            yield (
                f"the file has no {needed}, without which llama.cpp does not load a head alone. "
                "Export it again with --trunk."
            )
    if not any(key.startswith("tokenizer.ggml.tokens") for key in model.fields):
        yield "the file has no tokenizer, without which llama.cpp does not load a head alone."


def _arrays(found: FoundGguf) -> Iterator[str]:
    """Arrays with one value per layer that stop before the head's blocks."""
    if not found.blocks or not found.declared:
        return
    model, wanted = found.model, found.num_layers + found.declared
    for key in PER_LAYER:
        each = model.fields.get(f"{model.arch_name}.{key}")
        if each is not None and each.kind == ARRAY and each.length == found.num_layers:
            yield (
                f"{each.name} has {each.length} values for {wanted} blocks; llama.cpp asks for one "
                "each. Stitch the head again."
            )
