"""A head into a running vLLM's worker: what is loaded, and what is refused, without vLLM."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from headstart.calibrate.tiny import write_tiny
from headstart.vllm_plugin.swap import SWAP, HeadSwap


class Draft(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[Any] = []

    def load_weights(self, weights: Any) -> None:
        self.said.append(dict(weights))


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand-ins for what the extension calls; which of it was called, in order."""
    called: list[str] = []

    @contextmanager
    def current(config: Any) -> Any:
        yield

    names = ("vllm", "vllm.config", "vllm.model_executor", "vllm.model_executor.model_loader")
    for name in (*names, "vllm.model_executor.model_loader.reload"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.config"].set_current_vllm_config = current
    reload: Any = sys.modules["vllm.model_executor.model_loader.reload"]
    reload.initialize_layerwise_reload = lambda draft: called.append("begin")
    reload.finalize_layerwise_reload = lambda draft, config: called.append("end")
    return called


def worker(draft: Draft | None) -> Any:
    made: Any = HeadSwap()
    made.model_runner = SimpleNamespace(get_draft_model=lambda: draft)
    made.vllm_config = SimpleNamespace(
        speculative_config=SimpleNamespace(draft_model_config=SimpleNamespace())
    )
    return made


def test_every_tensor_of_the_folder_is_loaded_within_a_reload(
    tmp_path: Path, vllm: list[str]
) -> None:
    tensors = {
        "modules.0.fuse.weight": torch.ones(2, 3),
        "modules.0.out_norm.weight": torch.ones(3),
    }
    save_file(tensors, tmp_path / "head.safetensors")
    draft = Draft()
    assert getattr(worker(draft), SWAP)(str(tmp_path)) == {"tensors": 2, "head_version": 1}
    assert draft.said[0].keys() == tensors.keys()
    assert vllm == ["begin", "end"]


def test_a_head_that_was_read_before_is_taken(tmp_path: Path, vllm: list[str]) -> None:
    path = tmp_path / "head.safetensors"
    save_file({"modules.0.out_norm.weight": torch.ones(3)}, path)
    draft = Draft()
    made = worker(draft)
    made.headstart_prepare(str(tmp_path))
    while not made.headstart_is_prepared(str(tmp_path))["is"]:
        pass
    path.unlink()  # it is in memory already
    assert not made.headstart_is_prepared("another")["is"]
    assert made.headstart_swap(str(tmp_path))["tensors"] == 1
    assert draft.said[0]["modules.0.out_norm.weight"].tolist() == [1.0] * 3
    assert vllm == ["begin", "end"]


def test_of_a_whole_model_the_head_alone_is_taken(tmp_path: Path, vllm: list[str]) -> None:
    model = write_tiny("mimo", tmp_path / "model")
    draft = Draft()
    worker(draft).headstart_swap(str(model))
    assert draft.said[0] and all(name.startswith("model.mtp_layers.0.") for name in draft.said[0])
    assert vllm == ["begin", "end"]


def test_a_head_with_broken_values_is_not_loaded(tmp_path: Path, vllm: list[str]) -> None:
    broken = {"modules.0.out_norm.weight": torch.tensor([1.0, float("nan")])}
    save_file(broken, tmp_path / "head.safetensors")
    said = worker(Draft()).headstart_swap(str(tmp_path))
    assert "not finite; the running head stays" in said["error"]
    assert vllm == []


def test_a_folder_that_is_not_there_changes_nothing(tmp_path: Path, vllm: list[str]) -> None:
    said = worker(Draft()).headstart_swap(str(tmp_path / "none"))
    assert "no .safetensors file on this machine" in said["error"]
    assert vllm == []


@pytest.mark.usefixtures("vllm")
def test_without_a_draft_it_is_refused(tmp_path: Path) -> None:
    said = worker(None).headstart_swap(str(tmp_path))
    assert "no draft that could take another head" in said["error"]


def test_what_vllms_loader_refuses_is_said_in_one_line(tmp_path: Path, vllm: list[str]) -> None:
    class Other(Draft):
        def load_weights(self, weights: Any) -> None:
            raise ValueError("shapes (2,) and (3,) differ.\nfurther words")

    save_file({"modules.0.out_norm.weight": torch.ones(3)}, tmp_path / "head.safetensors")
    said = worker(Other()).headstart_swap(str(tmp_path))
    begun = "ValueError: shapes (2,) and (3,) differ. The draft may hold parts of both heads: "
    assert said == {"error": f"{begun}push a head of its model, or restart vLLM."}
    assert vllm == ["begin", "end"]


@pytest.mark.parametrize(
    ("device", "loads", "seen", "left"),
    [
        ("cpu", True, None, "new"),
        ("cpu", False, None, "old"),  # the head has nothing for these experts
        ("meta", True, "old", "new"),  # not a CPU: vLLM's own way
    ],
    ids=["packed anew", "not loaded", "another device"],
)
@pytest.mark.usefixtures("vllm")
def test_experts_on_a_cpu_are_loaded_as_if_for_the_first_time(
    device: str, loads: bool, seen: str | None, left: str, tmp_path: Path
) -> None:
    """Regression: vLLM 0.32 packs them only then, and a swapped DeepSeek-V3 head drafted worse."""
    method = SimpleNamespace(moe_kernel="old")
    found: list[str | None] = []

    class Mixture(Draft):
        def load_weights(self, weights: Any) -> None:
            found.append(method.moe_kernel)
            if loads:
                method.moe_kernel = "new"

    draft = Mixture()
    draft.experts = nn.Linear(2, 2, device=device)
    draft.experts.quant_method = method
    save_file({"experts.weight": torch.ones(3)}, tmp_path / "head.safetensors")
    assert "error" not in worker(draft).headstart_swap(str(tmp_path))
    assert found == [seen] and method.moe_kernel == left


def test_a_file_that_cannot_be_read_changes_nothing(tmp_path: Path, vllm: list[str]) -> None:
    (tmp_path / "head.safetensors").write_text("no")
    said = worker(Draft()).headstart_swap(str(tmp_path))
    assert said["error"].startswith("SafetensorError: ")
    assert "The running head stays" in said["error"]
    assert vllm == []


@pytest.mark.parametrize(
    ("part", "dtype", "expected"),
    [
        ("block", torch.uint8, "awq"),
        ("block", torch.bfloat16, None),  # a plain head beside a quantised trunk
        ("lm_head", torch.uint8, None),  # the trunk's
    ],
    ids=["quantised head", "plain head", "quantised LM head"],
)
def test_it_says_whether_the_head_is_quantised(
    part: str, dtype: torch.dtype, expected: str | None
) -> None:
    draft: Any = nn.Module()
    draft.norm = nn.LayerNorm(2)
    draft.register_module(part, nn.Module())
    value = nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=False)
    draft.get_submodule(part).register_parameter("weight", value)
    made = worker(draft)
    config = made.vllm_config.speculative_config.draft_model_config
    config.quantization = "awq"
    config.hf_config = SimpleNamespace(architectures=["MiMoMTPModel"])
    assert made.headstart_describe()["quantization"] == expected
    config.quantization = None
    assert made.headstart_describe()["quantization"] is None
    assert "no draft that could take" in worker(None).headstart_describe()["error"]
