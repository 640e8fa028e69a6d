"""From GGUF back to tensors under our names: every change of `spelling.py` undone.

Exact where types are: norms lose what is smaller than FP32 keeps beside 1, quantised matrices
are dequantised. What is not exact is said in words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headstart.checkpoint.gguf.encoding import PLAIN, decoded, encoded
from headstart.checkpoint.gguf.values import cast, floats_of, scaled, shifted
from headstart.checkpoint.source import TensorSource
from headstart.errors import MissingTensor, UnexpectedTensor
from headstart.families.names import Naming
from headstart.families.registry import family
from headstart.heads.experts import fuse_experts, unstack_experts
from headstart.heads.formats.gguf.arch import Arch
from headstart.heads.formats.gguf.spelling import SpelledHead, paired
from headstart.heads.latent import joined_kv_b
from headstart.heads.operation import counted

Places = Mapping[tuple[int, str], TensorSource]  # module and name below `blk.N.` -> tensor
_KV_B = ("attn_k_b.weight", "attn_v_b.weight")


def unspelled(
    spelled: SpelledHead, *, as_stored: bool = False
) -> tuple[dict[str, TensorSource], tuple[str, ...]]:
    """Tensors under our names, and what is not as it was published, in words.

    `as_stored`: to be run, so that matrices keep the types of the file and norms stay in FP32.
    """
    arch, record = spelled.arch, spelled.record
    keys, naming = family(arch.family).keys, Naming(num_layers=1)
    usual = "F32" if as_stored else _usual_dtype(spelled)
    tensors = _with_scales(spelled.tensors, usual)
    result: dict[str, TensorSource] = {}
    for module in range(spelled.num_modules):
        own = {name: source for (m, name), source in tensors.items() if m == module}
        for name in [each for each in arch.paired if each in own]:
            own[name] = paired(name, own[name], spelled.head_dim, back=True)
        for name, source, is_norm in _ours(own, arch):
            full = f"modules.{module}.{name}"
            if arch.shares_roles and module and not keys.has_place(full, naming):
                _check_same(full, source, tensors, name, arch)
                continue
            is_shifted = is_norm and arch.shifts_norms
            if as_stored:
                result[full] = shifted(source, -1.0) if is_shifted else source
            else:
                result[full] = _restored(full, source, is_shifted, usual, record)
    if record.get("experts") == "fused" and not as_stored:
        result = fuse_experts(result)
    return result, tuple(_said(spelled, usual))


def _with_scales(tensors: Places, usual: str) -> dict[tuple[int, str], TensorSource]:
    """Weights with the scale that NVFP4 files keep beside them multiplied in.

    Scales of inputs are for kernels that quantise activations, and change no weight.
    """
    result = dict(tensors)
    for (module, name), factors in tensors.items():
        stem, _, parameter = name.rpartition(".")
        weight = module, f"{stem}.weight"
        if parameter in ("scale", "input_scale") and weight in tensors:
            del result[module, name]
            if parameter == "scale":
                result[weight] = scaled(tensors[weight], factors, usual)
    return result


def _said(spelled: SpelledHead, usual: str) -> Iterator[str]:
    lossy = [s for s in spelled.tensors.values() if s.dtype not in PLAIN]
    if lossy:
        kinds = " and ".join(sorted({source.dtype for source in lossy}))
        yield (
            f"{counted(len(lossy), 'tensor')} of the GGUF file are {kinds}: dequantised to "
            f"{usual}, not the published values"
        )
    was = str(spelled.record.get("dtype", ""))
    plain = {s.dtype for (_, n), s in spelled.tensors.items() if not n.endswith("norm.weight")}
    if was == "BF16" and "F16" in plain:
        yield "matrices went through F16, which rounds small and large BF16 values"
    elif was not in ("", *PLAIN):
        yield f"the published weights were {was}; these are their values in {usual}"
    if not spelled.record:
        yield (
            "the file does not say how the published tensors were stored: dtypes are chosen by "
            "what holds their values exactly"
        )


def _ours(own: Mapping[str, TensorSource], arch: Arch) -> Iterator[tuple[str, TensorSource, bool]]:
    """Our names below the module, with whether each is a norm."""
    back = {theirs: ours for ours, theirs in arch.names.items()}
    for name, source in own.items():
        if name in _KV_B and arch.kv_b:
            continue
        if name in back:
            yield back[name], source, False
            continue
        module, _, parameter = name.rpartition(".")
        if module not in back:
            raise UnexpectedTensor(
                f"the head holds {name}, which is not known of {arch.name}. The file was made by "
                "another tool or a newer llama.cpp; update Headstart."
            )
        ours = f"{back[module]}.{parameter}"
        for each, part in unstack_experts({ours: source}).items():
            yield each, part, name.endswith("norm.weight")
    if arch.kv_b:
        lost = next((n for n in _KV_B if n not in own), None)
        if lost is not None:
            raise MissingTensor(f"the head has no {lost}, which {arch.name} needs.")
        yield f"{arch.kv_b}.weight", joined_kv_b(*(own[n] for n in _KV_B)), False


def _usual_dtype(spelled: SpelledHead) -> str:
    """What the matrices were published as, as far as is known."""
    was = spelled.record.get("dtype")
    if was in PLAIN:
        return str(was)
    plain = [s.dtype for s in spelled.tensors.values() if s.dtype in PLAIN and len(s.shape) > 1]
    return max(set(plain), key=plain.count) if plain else "BF16"


def _restored(
    name: str, source: TensorSource, is_shifted: bool, usual: str, record: Mapping[str, Any]
) -> TensorSource:
    """The tensor in the dtype that it was published in, or that holds its values."""
    dtypes = record.get("dtypes")
    listed = dtypes.get(name) if isinstance(dtypes, dict) else None
    wanted = listed if listed in PLAIN else usual
    if source.dtype == "F32" and not record and not _fits(source, wanted, is_shifted):
        wanted = "F32"
    if not is_shifted:
        return cast(source, wanted)
    small = record.get("small")
    kept = small.get(name) if isinstance(small, dict) else None
    return _put_back(source, wanted, kept) if kept else shifted(source, -1.0, wanted)


def _put_back(source: TensorSource, dtype: str, kept: Any) -> TensorSource:
    """The norm with the small values that FP32 did not keep beside 1, where they still fit."""

    def pieces() -> Iterator[memoryview]:
        import numpy as np

        stored, one = floats_of(source), np.float32(1)
        values = stored - one
        for entry in kept if isinstance(kept, list) else []:
            place, value = entry if isinstance(entry, list) and len(entry) == 2 else (-1, 0.0)
            if type(place) is int and 0 <= place < len(values) and isinstance(value, float):
                small = np.float32(value)
                if small + one == stored[place]:  # else the norm was changed since
                    values[place] = small
        yield encoded(values, dtype)

    return TensorSource(dtype, source.shape, pieces, is_copy=False)


def _fits(source: TensorSource, dtype: str, is_shifted: bool) -> bool:
    """Whether nothing is lost in `dtype`; only vectors and routers are looked at, which are few."""
    import numpy as np

    if dtype == "F32":
        return True
    stored, one = floats_of(source), np.float32(1)
    values = stored - one if is_shifted else stored
    back = decoded(dtype, bytes(encoded(values, dtype))).reshape(stored.shape)
    return bool(np.array_equal(back + one if is_shifted else back, stored))


def _check_same(
    full: str,
    source: TensorSource,
    tensors: Places,
    name: str,
    arch: Arch,
) -> None:
    """A tensor that is stored again for every module must be the same each time."""
    import numpy as np

    gguf = next(g for (_, g) in tensors if g.rpartition(".")[0] == arch.names[name.split(".")[0]])
    if not np.array_equal(floats_of(source), floats_of(tensors[0, gguf])):
        raise UnexpectedTensor(
            f"{full} differs from that of the first module; {arch.family} has one for all. The "
            "file was not made from such a head."
        )
