"""Which backend runs what: facts of a model and options in, a name and reasons out."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headstart.backends import select as select_module
from headstart.backends.numba import support as numba_support
from headstart.backends.options import BackendOptions
from headstart.backends.select import (
    TABLE,
    Selection,
    check_formats,
    held_as_stored,
    load_backend,
    select,
)
from headstart.calibrate.tiny_configs import TINY_CONFIGS
from headstart.checkpoint.quantized.weights import FORMS
from headstart.errors import ConfigError
from headstart.models.build import LoadedModel
from headstart.models.config import ModelConfig
from headstart.models.config_reader import model_config

_DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


@dataclass(frozen=True)
class Facts:
    """What the decision looks at; no weights."""

    kind: str = "mimo"
    device: str = "cpu"
    dtype: torch.dtype | None = None  # the device's own
    modules: int = 1
    topology: str = "chained"
    out_norm_mean: str = "kept"
    changes: tuple[tuple[str, Any], ...] = ()

    def model(self) -> LoadedModel:
        config = self._config()
        layout = SimpleNamespace(topology=self.topology, out_norm_mean=self.out_norm_mean)
        head = SimpleNamespace(num_modules=self.modules, config=config, layout=layout)
        return LoadedModel(
            None, config, None, head if self.modules else None, self.dtype or _DTYPES[self.device],
            torch.device(self.device), 64, (),
        )  # fmt: skip

    def _config(self) -> ModelConfig:
        return replace(model_config(TINY_CONFIGS[self.kind]), **dict(self.changes))


def facts(kind: str = "mimo", device: str = "cpu", **others: Any) -> Facts:
    return Facts(kind, device, **others)


@pytest.fixture(autouse=True)
def _whole_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba and Triton are there, whatever this machine has."""
    monkeypatch.setattr(numba_support, "why_missing", lambda: None)
    _with_triton(monkeypatch, is_there=True)


def _with_triton(monkeypatch: pytest.MonkeyPatch, *, is_there: bool) -> None:
    found = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return (object() if is_there else None) if name == "triton" else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16

# facts, options, and the reasons of those that stand before the chosen one
CHOICES: dict[str, tuple[Facts, dict[str, Any], str, list[str]]] = {
    "a dense model on a CPU": (facts(), {}, "numba", ["the device is cpu"]),
    "the same in int8": (facts(), {"weights": "int8"}, "numba", ["the device is cpu"]),
    "the same without kernels": (
        facts(), {"kernels": "off"}, "torch", ["kernels are off", "kernels are off"],
    ),
    "int8 without kernels": (
        facts(), {"kernels": "off", "weights": "int8"}, "torch", ["kernels are off"] * 2,
    ),
    "exact on a CPU": (
        facts(), {"exact": True}, "torch", ["the device is cpu", "exact runs in plain PyTorch"],
    ),
    "bfloat16 on a CPU": (facts(dtype=BF16), {}, "torch", ["device", "numbers are torch.bfloat16"]),
    "float64 on a CPU": (facts(dtype=F64), {}, "torch", ["device", "numbers are torch.float64"]),
    "experts on a CPU": (facts("glm4_moe"), {}, "numba", ["device"]),
    "experts in int8": (facts("glm4_moe"), {"weights": "int8"}, "numba", ["device"]),
    "latents on a CPU": (facts("deepseek_v3"), {}, "numba", ["device"]),
    "a recurrent model on a CPU": (facts("qwen3_next"), {}, "numba", ["device"]),
    "norms of queries on a CPU": (facts("qwen3"), {}, "numba", ["device"]),
    "windows and sinks on a CPU": (facts("mimo_v2"), {}, "numba", ["device"]),
    "odd heads on a CPU": (
        facts(changes=(("head_dim", 24), ("v_dim", 24))), {}, "numba", ["device"],
    ),
    "an indexer on a CPU": (facts("deepseek_v32"), {}, "torch", ["device", "by an indexer"]),
    "Mamba on a CPU": (facts("nemotron_h"), {}, "torch", ["device", "layers"]),
    "Kimi's delta attention on a CPU": (
        facts("bailing_moe_v3"), {}, "torch", ["device", "fade each by itself"],
    ),
    "a head whose out norm subtracts a mean": (
        facts(out_norm_mean="subtracted"), {}, "torch", ["device", "subtracts a mean"],
    ),
    "several modules on a CPU": (facts(modules=3), {}, "numba", ["device"]),
    "interpreted kernels on a CPU": (facts(), {"kernels": "on"}, "cuda", []),
    "interpreted fp8 on a CPU": (facts(), {"kernels": "on", "weights": "fp8"}, "cuda", []),
    "interpreted exact on a CPU": (facts(), {"kernels": "on", "exact": True}, "cuda", []),
    "a dense model on a GPU": (facts(device="cuda"), {}, "cuda", []),
    "the same without a head": (facts(device="cuda", modules=0), {}, "cuda", []),
    "the same in fp8": (facts(device="cuda"), {"weights": "fp8"}, "cuda", []),
    "the same, exact": (facts(device="cuda"), {"exact": True}, "cuda", []),
    "drafts in int8": (facts(device="cuda"), {"draft_weights": "int8"}, "cuda", []),
    "experts on a GPU": (facts("glm4_moe", "cuda"), {}, "cuda", []),
    "latents on a GPU": (facts("deepseek_v3", "cuda"), {}, "cuda", []),
    "a recurrent model on a GPU": (facts("qwen3_next", "cuda"), {}, "cuda", []),
    "a GPU without kernels": (
        facts(device="cuda"), {"kernels": "off"}, "torch",
        ["kernels are off", "the device is cuda"],
    ),
    "float64 on a GPU": (
        facts(device="cuda", dtype=F64), {}, "torch", ["numbers are float64", "the device is cuda"],
    ),
    "wide heads in float32 on a GPU": (
        facts(device="cuda", dtype=F32, changes=(("head_dim", 256), ("v_dim", 256))), {}, "torch",
        ["numbers are float32 and heads of size 256", "the device is cuda"],
    ),
    "several modules on a GPU": (facts(device="cuda", modules=3), {}, "cuda", []),
    "several parallel modules on a GPU": (
        facts(device="cuda", modules=3, topology="parallel"), {}, "cuda", [],
    ),
    "sliding windows on a GPU": (facts("step3p5", "cuda"), {}, "cuda", []),
    "an indexer on a GPU": (facts("deepseek_v32", "cuda"), {}, "cuda", []),
    "exact latents on a GPU": (facts("deepseek_v3", "cuda"), {"exact": True}, "cuda", []),
    "exact recurrent layers on a GPU": (facts("qwen3_next", "cuda"), {"exact": True}, "cuda", []),
    "Mamba layers on a GPU": (
        facts("nemotron_h", "cuda"), {}, "torch", ["models have Mamba layers", "device"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "options", "name", "reasons"), CHOICES.values(), ids=CHOICES)
def test_the_first_backend_without_a_reason_against_it_runs_a_model(
    given: Facts, options: dict[str, Any], name: str, reasons: list[str]
) -> None:
    found = select(given.model(), BackendOptions(**options))
    assert found.name == name
    asked = list(TABLE)[: len(reasons)]
    assert list(found.reasons) == asked and list(TABLE)[len(asked)] == name
    for wanted, reason in zip(reasons, found.reasons.values(), strict=True):
        assert wanted in reason


def test_where_a_package_is_missing_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba_support, "why_missing", lambda: "numba is not installed")
    found = select(facts().model(), BackendOptions())
    assert (found.name, found.reasons["numba"]) == ("torch", "numba is not installed")
    _with_triton(monkeypatch, is_there=False)
    found = select(facts(device="cuda").model(), BackendOptions())
    assert (found.name, found.reasons["cuda"]) == ("torch", "triton is not installed")


REFUSALS: dict[str, tuple[Facts, dict[str, Any], str]] = {
    "int8 on a GPU": (
        facts(device="cuda"), {"weights": "int8"}, "weights int8 is a CPU format; use weights fp8",
    ),
    "fp8 on a CPU": (facts(), {"weights": "fp8"}, "weights fp8 is a GPU format; use weights int8"),
    "exact without kernels on a GPU": (
        facts(device="cuda"), {"exact": True, "kernels": "off"},
        "exact and kernels off were both given on a GPU",
    ),
    "exact in bfloat16 on a CPU": (
        facts(dtype=BF16), {"exact": True},
        "on a CPU exact is for float32 and float64, not for torch.bfloat16",
    ),
    "exact in int8": (
        facts(), {"exact": True, "weights": "int8"}, "exact needs weights as they are, not int8",
    ),
    "kernels for float64": (
        facts(dtype=F64), {"kernels": "on"},
        "kernels on was asked for and numbers are float64. Use kernels auto",
    ),
    "kernels for Mamba layers on a GPU": (
        facts("nemotron_h", "cuda"), {"kernels": "on"},
        "kernels on was asked for and nemotron_h models have Mamba layers",
    ),
    "int8 by interpreted kernels": (
        facts(), {"kernels": "on", "weights": "int8"},
        "kernels on was asked for and weights are int8",
    ),
    "fp8 where the kernels do not run": (
        facts("nemotron_h", "cuda"), {"weights": "fp8"},
        "weights fp8 needs the kernels and nemotron_h models have .* layers. Use weights as-dtype",
    ),
    "fp8 K/V of latents": (
        facts("deepseek_v3"), {"kv_dtype": "fp8"},
        "kv_dtype fp8 was asked for and deepseek_v3 models keep latents, which are held in",
    ),
    "fp8 K/V with windows": (
        facts("step3p5", "cuda"), {"kv_dtype": "fp8"},
        "kv_dtype fp8 needs the kernels on a GPU and the model has windows .* Leave kv_dtype out",
    ),
    "int8 drafts on a CPU": (
        facts(), {"draft_weights": "int8"},
        "draft_weights int8 was asked for and only the kernels of the GPU path have it",
    ),
    "int8 drafts without a head": (
        facts(device="cuda", modules=0), {"draft_weights": "int8"}, "the engine runs without a head"
    ),
    "int8 drafts, exact": (
        facts(device="cuda"), {"draft_weights": "int8", "exact": True},
        "exact runs everything as it is. Leave it out",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "options", "words"), REFUSALS.values(), ids=REFUSALS)
def test_options_that_would_have_to_be_ignored_are_refused(
    given: Facts, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        select(given.model(), BackendOptions(**options))


def test_an_older_gpu_holds_no_8_bit_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = facts(device="cuda").model()
    for capability, forms in (((8, 0), ("int4-group", "int8-group")), ((9, 0), FORMS)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, own=capability: own)
        held = held_as_stored(model, BackendOptions())
        assert tuple(held.trunk) == tuple(held.head) == tuple(held.experts or ()) == forms
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    with pytest.raises(ConfigError, match="the GPU does not multiply 8-bit floats"):
        select(model, BackendOptions(weights="fp8"))


def test_formats_are_refused_before_anything_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select_module, "build", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(ConfigError, match="weights fp8 is a GPU format"):
        load_backend(
            None, None, BackendOptions(weights="fp8"), device="cpu",
            dtype="auto", max_model_len=None, layout="own", with_head=True,
        )  # fmt: skip


def test_formats_that_exist_pass() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    check_formats(cpu, F32, BackendOptions(weights="int8"))
    check_formats(cpu, F64, BackendOptions(exact=True))
    check_formats(cpu, BF16, BackendOptions(exact=True, kernels="on"))
    check_formats(gpu, BF16, BackendOptions(weights="fp8"))
    check_formats(gpu, BF16, BackendOptions(exact=True))


def test_notes_say_what_a_model_misses_and_nothing_about_other_devices() -> None:
    found = Selection("torch", {"cuda": "the device is cpu", "numba": "the model has experts"})
    assert found.notes == ["not backend numba: the model has experts"]
    assert Selection("cuda", {}).notes == []
