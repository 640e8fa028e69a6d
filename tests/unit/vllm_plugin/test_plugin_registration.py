"""The entry point, and what it does in vLLMs of any kind; a stand-in has vLLM's module names.

The real ones run it in scripts/interop/vllm_plugin_check.py.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from headstart import vllm_plugin
from headstart.errors import ConfigError
from headstart.families.registry import families
from headstart.heads.formats.vllm import PLUGIN as GRAFTED
from headstart.vllm_plugin import collect, stock
from headstart.vllm_plugin.architectures import DRAFT_CLASSES, why_no_vocab
from headstart.vllm_plugin.classes import drafting_class
from headstart.vllm_plugin.registration import register_all
from headstart.vllm_plugin.settings import WORKER
from headstart.vocab.draft_vocab import DraftVocab
from headstart.vocab.files import write

ROOT = Path(__file__).parents[3]


class Registry:
    """What is used of vLLM's ModelRegistry."""

    def __init__(self, **places: str):
        self.models: dict[str, Any] = {}
        for name, place in places.items():
            self.register_model(name, place)

    def register_model(self, name: str, place: str) -> None:
        module, cls = place.split(":")
        self.models[name] = SimpleNamespace(module_name=module, class_name=cls)


def stand_in(monkeypatch: pytest.MonkeyPatch, version: str, registry: Any) -> None:
    """Modules of vLLM's names: its version, and its registry (None: a fork without one)."""
    names = ["vllm", "vllm.model_executor", "vllm.model_executor.models"]
    for name in (*names, "vllm.version", "vllm.model_executor.models.registry"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.version"].__version__ = version
    if registry is not None:
        module = sys.modules["vllm.model_executor.models.registry"]
        module.ModelRegistry = registry


def test_importing_it_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; import headstart.vllm_plugin; "
        "sys.exit(bool({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_entry_point_is_the_function() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = project["entry-points"]["vllm.general_plugins"]
    assert named == {"headstart": f"{vllm_plugin.__name__}:{vllm_plugin.register.__name__}"}
    assert "vllm" in project["optional-dependencies"]


def test_without_vllm_it_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    vllm_plugin.register()
    (line,) = caplog.messages
    assert "cannot be used here" in line and "as without it" in line


@pytest.mark.parametrize(
    ("version", "words"),
    [("0.33.0", "too new"), ("0.25.0", "too old"), ("dev", "no release's"), ("0.32.0", "cannot")],
    ids=["too new", "too old", "a fork's version", "a fork without a registry"],
)
def test_other_vllms_run_as_without_it(
    version: str, words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registry = Registry(MiMoMTPModel="vllm.mimo_mtp:MiMoMTP")
    stand_in(monkeypatch, version, None if words == "cannot" else registry)
    register_all()
    (line,) = caplog.messages
    assert words in line and "vLLM runs as without it" in line
    assert registry.models["MiMoMTPModel"].module_name == "vllm.mimo_mtp"


def test_it_can_be_turned_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    registry = Registry(MiMoMTPModel="vllm.mimo_mtp:MiMoMTP")
    stand_in(monkeypatch, "0.32.0", registry)
    monkeypatch.setenv("HEADSTART_VLLM", "off")
    register_all()
    assert "HEADSTART_VLLM is off" in caplog.text
    assert list(registry.models) == ["MiMoMTPModel"]


def test_every_mtp_class_is_registered_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(
        MiMoMTPModel="vllm.mimo_mtp:MiMoMTP", NewMTP="vllm.new:New", LlamaForCausalLM="vllm.l:L"
    )
    stand_in(monkeypatch, "0.32.0", registry)
    monkeypatch.setattr(stock, "_PLACES", {})
    for _ in range(2):  # vLLM may load plugins again
        register_all()
    assert registry.models["LlamaForCausalLM"].module_name == "vllm.l"
    ours = registry.models["MiMoMTPModel"]
    assert (ours.module_name, ours.class_name) == (
        "headstart.vllm_plugin.classes", "MiMoMTPModel_of_0_32_0",
    )  # fmt: skip
    assert stock._PLACES["MiMoMTPModel"] == ("vllm.mimo_mtp", "MiMoMTP")
    assert GRAFTED in registry.models
    assert why_no_vocab("MiMoMTPModel") == why_no_vocab(GRAFTED) == ""
    assert "does not know" in why_no_vocab("NewMTP")


def test_the_table_names_families_of_the_registry() -> None:
    known = {family.name for family in families()}
    named = {name for of_class in DRAFT_CLASSES.values() for name in of_class}
    assert named <= known
    served = {f.name for f in families() if "vllm" in (*f.served, *f.served_apart)}
    others = {"gemma4_assistant", "step5"}  # the last from vLLM 0.33 on, which is too new
    assert served - named == others, "every family that vLLM serves has a class"


class LogitsProcessor(nn.Module):
    scale, org_vocab_size = 1.0, 20

    def forward(self, lm_head: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ lm_head.weight.t()


class Stock(nn.Module):
    """A draft class as vLLM's are."""

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__()
        self.model = nn.Module()
        self.model.logits_processor = LogitsProcessor()
        self.lm_head = nn.Embedding(20, 8)
        self.lm_head.tp_size, self.lm_head.num_embeddings_per_partition = 1, 20
        self.lm_head.shard_indices = SimpleNamespace(
            org_vocab_start_index=0, org_vocab_end_index=20
        )

    def compute_logits(self, hidden_states: torch.Tensor, spec_step_idx: int = 0) -> Any:
        return self.model.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Any) -> set[str]:
        self.lm_head.weight.data.copy_(dict(weights)["lm_head.weight"])
        return {"lm_head.weight"}


@pytest.fixture
def with_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "vllm.model_executor.layers.logits_processor"
    for part in ("vllm", "vllm.model_executor", "vllm.model_executor.layers", name):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    sys.modules[name].LogitsProcessor = LogitsProcessor


def config(additional: dict[str, Any], worker: str = "vllm.v1.worker.gpu_worker.Worker") -> Any:
    draft = SimpleNamespace(hf_config=SimpleNamespace(), model="h")
    return SimpleNamespace(
        additional_config=additional,
        parallel_config=SimpleNamespace(worker_cls=worker),
        model_config=SimpleNamespace(get_vocab_size=lambda: 20),
        speculative_config=SimpleNamespace(
            draft_model_config=draft, use_local_argmax_reduction=True
        ),
    )


def test_nothing_asked_gives_vllms_own_class() -> None:
    made = drafting_class("MiMoMTPModel", Stock)(vllm_config=config({}), prefix="")
    assert type(made) is Stock


def test_a_class_without_place_for_a_vocabulary_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = config({"headstart": {"draft_vocab": str(tmp_path / "any.json")}})
    made = drafting_class("Gemma4MTPModel", Stock)(vllm_config=asked, prefix="")
    assert type(made) is Stock
    assert "nothing of what was asked for Gemma4MTPModel" in caplog.text


def test_collecting_needs_our_worker(tmp_path: Path) -> None:
    made = drafting_class("MiMoMTPModel", Stock)
    asked = {"headstart": {"collect": str(tmp_path)}}
    with pytest.raises(ConfigError, match=f"Add --worker-cls {WORKER}"):
        made(vllm_config=config(asked), prefix="")
    with pytest.raises(ConfigError, match="no attention layer"):  # it was let in
        made(vllm_config=config(asked, WORKER), prefix="")
    module, name = WORKER.rsplit(".", 1)
    assert module == collect.__name__ and name == "Worker"


@pytest.mark.usefixtures("with_processor")
def test_asked_it_drafts_listed_tokens_and_follows_new_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ids = (2, 3, 5, 7, 11, 13)
    write([DraftVocab(ids=ids, vocab_size=20)], tmp_path / "v.json")
    asked = config({"headstart": {"draft_vocab": str(tmp_path / "v.json")}})
    made: Any = drafting_class("MiMoMTPModel", Stock)(vllm_config=asked, prefix="")
    assert isinstance(made, Stock) and type(made).__name__ == "Stock"
    assert "drafts from 6 of 20 tokens" in caplog.text
    hidden = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        scores = (hidden @ made.lm_head.weight.t()).detach()
        expected = [ids[int(i)] for i in scores[:, list(ids)].argmax(-1)]
        assert made.get_top_tokens(hidden).tolist() == expected
        assert made.compute_logits(hidden).argmax(-1).tolist() == expected
        made.load_weights([("lm_head.weight", -made.lm_head.weight.detach())])


@pytest.mark.usefixtures("with_processor")
def test_a_list_of_another_model_is_refused(tmp_path: Path) -> None:
    from headstart.errors import DataError

    write([DraftVocab(ids=(1, 40), vocab_size=41)], tmp_path / "v.json")
    asked = config({"headstart": {"draft_vocab": str(tmp_path / "v.json")}})
    with pytest.raises(DataError, match="vocabulary of 41 tokens; the model has 20"):
        drafting_class("MiMoMTPModel", Stock)(vllm_config=asked, prefix="")
