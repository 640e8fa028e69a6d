"""THE decision which backend runs a model: the first of the table that has no reason against it.

| backend | runs |
|---|---|
| cuda | models whose layers all have fused kernels, on a GPU (or interpreted, with kernels on) |
| numba | models whose layers all have compiled kernels, in float32, int8 or 4 bits on a CPU |
| torch | everything, in plain PyTorch: the reference |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from headstart.backends.base import Backend
from headstart.backends.cuda import support as cuda
from headstart.backends.numba import support as numba
from headstart.backends.options import BackendOptions
from headstart.backends.weights import TAKEN_EXPERTS, TAKEN_FORMS
from headstart.checkpoint.reader import Checkpoint
from headstart.errors import ConfigError
from headstart.models.build import Held, LoadedModel, build, resolve_device, resolve_dtype
from headstart.models.stored import Layout

WhyNot = Callable[[LoadedModel, BackendOptions], str | None]

TABLE: dict[str, WhyNot] = {
    "cuda": cuda.why_not,
    "numba": numba.why_not,
    "torch": lambda model, options: None,
}


@dataclass(frozen=True)
class Selection:
    """The backend that runs a model, and why those before it in the table do not."""

    name: str
    reasons: dict[str, str]  # by backend

    @property
    def notes(self) -> list[str]:
        """For people: what the model misses, where that is more than another device."""
        shown = {
            name: reason
            for name, reason in self.reasons.items()
            if not reason.startswith(("the device is", "kernels are"))
        }
        return [f"not backend {name}: {reason}" for name, reason in shown.items()]


def load_backend(
    checkpoint: Checkpoint, head: Path | None, options: BackendOptions, *, device: str, dtype: str,
    max_model_len: int | None, layout: Layout, with_head: bool,
) -> Backend:  # fmt: skip
    """Load a model and give it to the backend that runs it."""
    place = resolve_device(device)
    check_formats(place, resolve_dtype(dtype, place), options)
    model = build(
        checkpoint, head, device=device, dtype=dtype, max_model_len=max_model_len, layout=layout,
        with_head=with_head, holds=partial(held_as_stored, options=options),
    )  # fmt: skip
    return create_backend(model, options)


def held_as_stored(model: LoadedModel, options: BackendOptions) -> Held:
    """Which quantised weights stay as they are stored, for the backend that will run the model."""
    name = select(model, options).name
    if options.exact:
        return Held(why_not="exact computes with weights in the model's own type")
    if options.weights not in ("as-dtype", "int8", "int4"):
        return Held(why_not=f"weights {options.weights} were asked for")
    if model.dtype == torch.float64:
        return Held(why_not="numbers are float64")
    if options.weights == "int8":  # a head that drafts in 4 bits reads less than one in 8
        kept = tuple(form for form in TAKEN_FORMS[name] if form.startswith("int"))
        return Held((), kept, "weights int8 were asked for", ())
    forms, experts = TAKEN_FORMS[name], TAKEN_EXPERTS[name]
    if name == "cuda" and not cuda.has_fp8(model.device):
        forms, experts = (
            tuple(form for form in taken if not form.startswith("fp8"))
            for taken in (forms, experts)
        )  # fmt: skip
    if options.weights == "int4":  # what has 4 bits already is not rounded again
        forms = tuple(form for form in forms if form.startswith("int4"))
        experts = tuple(form for form in experts if form.startswith("int4"))
    why_not = f"backend {name} does not compute with this format"
    if forms and not experts:
        why_not += ", or not among experts"
    return Held(forms, forms, why_not, experts)


def create_backend(model: LoadedModel, options: BackendOptions) -> Backend:
    """The backend of a model, which is its own from now on: weights may change their format."""
    selected = select(model, options)
    backend = _make(selected.name, model, options)
    backend.notes[:0] = selected.notes
    return backend


def _make(name: str, model: LoadedModel, options: BackendOptions) -> Backend:
    if name == "cuda":
        from headstart.backends.cuda.backend import CudaBackend

        return CudaBackend(model, options)
    if name == "numba":
        from headstart.backends.numba.backend import NumbaBackend

        return NumbaBackend(model, options)
    from headstart.backends.torch.backend import TorchBackend

    return TorchBackend(model, options)


def select(model: LoadedModel, options: BackendOptions) -> Selection:
    """Ask the table from the top; ConfigError where options and model exclude each other."""
    check_formats(model.device, model.dtype, options)
    reasons: dict[str, str] = {}
    for name, why_not in TABLE.items():
        reason = why_not(model, options)
        if reason is None:
            break
        reasons[name] = reason
    _check_chosen(name, reasons, model, options)
    return Selection(name, reasons)


def check_formats(device: torch.device, dtype: torch.dtype, options: BackendOptions) -> None:
    """Refuse combinations of device and number format that do not exist, before anything loads."""
    is_gpu, is_interpreted = device.type == "cuda", options.kernels == "on"
    if options.weights in ("int8", "int4") and is_gpu:
        raise ConfigError(f"weights {options.weights} is a CPU format; use weights fp8 on a GPU.")
    if options.weights == "fp8" and not is_gpu and not is_interpreted:
        raise ConfigError("weights fp8 is a GPU format; use weights int8 on a CPU.")
    if not options.exact:
        return
    if is_gpu and options.kernels == "off":
        raise ConfigError(
            "exact and kernels off were both given on a GPU, where libraries choose their "
            "arithmetic by the number of rows. Leave one of them out, or use device cpu."
        )
    if is_gpu or is_interpreted:
        return
    if dtype not in (torch.float32, torch.float64):
        raise ConfigError(
            f"on a CPU exact is for float32 and float64, not for {dtype}. Change dtype, or leave "
            "exact out."
        )
    if options.weights != "as-dtype":
        raise ConfigError(
            f"exact needs weights as they are, not {options.weights}. Leave one of them out."
        )


def _check_chosen(
    name: str, reasons: dict[str, str], model: LoadedModel, options: BackendOptions
) -> None:
    """Refuse options that the chosen backend would have to ignore."""
    if name != "cuda":
        reason = reasons["cuda"]
        if options.kernels == "on":
            raise ConfigError(f"kernels on was asked for and {reason}. Use kernels auto.")
        if options.weights == "fp8":
            raise ConfigError(f"weights fp8 needs the kernels and {reason}. Use weights as-dtype.")
        if options.exact and model.device.type == "cuda":
            raise ConfigError(f"exact needs the kernels on a GPU and {reason}. Leave exact out.")
    if options.kv_dtype == "fp8":
        _check_kv(name, reasons, model)
    if options.draft_weights == "int8":
        _check_draft_weights(name, model, options)


def _check_kv(name: str, reasons: dict[str, str], model: LoadedModel) -> None:
    if model.config.mla is not None:
        raise ConfigError(
            f"kv_dtype fp8 was asked for and {model.config.model_type} models keep latents, which "
            "are held in the model's own type. Leave it out."
        )
    if model.config.index is not None or model.config.compressed is not None:
        raise ConfigError(
            f"kv_dtype fp8 was asked for and {model.config.model_type} models keep more of a "
            "token than K and V, all of it in the model's own type. Leave it out."
        )
    if name != "cuda" and model.device.type == "cuda":
        raise ConfigError(
            f"kv_dtype fp8 needs the kernels on a GPU and {reasons['cuda']}. Leave kv_dtype out."
        )


def _check_draft_weights(name: str, model: LoadedModel, options: BackendOptions) -> None:
    why = None
    if name != "cuda":
        why = "only the kernels of the GPU path have it"
    elif model.head is None:
        why = "the engine runs without a head"
    elif options.exact:
        why = "exact runs everything as it is"
    if why is not None:
        raise ConfigError(f"draft_weights int8 was asked for and {why}. Leave it out.")
