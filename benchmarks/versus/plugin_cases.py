"""The models of `gpu_vllm_plugin.py`, and how vLLM is started with each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from headstart.calibrate.calibrated import agreement_of
from headstart.calibrate.shape_config import shape_config
from headstart.checkpoint.values import load
from headstart.heads.export import plan_export
from headstart.heads.formats import head_in, open_head, open_model
from headstart.heads.formats.vllm import COUNT, KEY, PLUGIN, PLUGIN_TYPE, STOCK, overrides
from headstart.vllm_plugin.settings import WORKER
from headstart.vllm_plugin.swap import EXTENSION
from headstart.vocab.draft_vocab import DraftVocab
from headstart.vocab.files import write
from versus.quick_checkpoints import write_quickly


@dataclass(frozen=True)
class Scale:
    """Sizes of everything: for a large GPU, or to try the program."""

    shapes: dict[str, str]
    active: int
    prompt: int
    answer: int
    requests: dict[str, tuple[int, ...]]  # by case
    swap_requests: int
    swap_tokens: int
    memory: float  # of the GPU that has to be free when vLLM starts
    engine: dict[str, Any] = field(default_factory=dict)  # what vLLM is told beside
    drafts: int = 3
    rate: float = 0.8

    @property
    def max_model_len(self) -> int:
        return self.prompt + max(self.answer, self.swap_tokens) + 64


WHOLE = Scale(
    shapes={"vocab": "mimo-7b", "graft": "qwen3-8b"}, active=32000, prompt=256, answer=500,
    requests={"vocab": (1, 16, 80), "graft": (1, 16)}, swap_requests=16, swap_tokens=1500,
    memory=0.05,
    engine={
        # Several engines start at once, so none of them can measure what is free.
        "kv_cache_memory_bytes": 10 * 2**30, "max_num_batched_tokens": 8192,
        # Fewer sizes than vLLM would capture: for drafts of up to 80 requests all of them, for
        # passes of the target, of 4 tokens each, those that differ by 8 requests.
        "compilation_config": {"cudagraph_capture_sizes": [
            1, 2, 4, *range(8, 81, 8), *range(96, 321, 32),
        ]},
    },
)  # fmt: skip
_TINY = "layers=2,hidden=128,vocab=400,intermediate=128,heads=4,kv_heads=2,head_dim=32"
SMALL = Scale(
    shapes={"vocab": f"mimo-7b,{_TINY}", "graft": f"qwen3-8b,{_TINY}"}, active=24, prompt=16,
    answer=24, requests={"vocab": (1, 2), "graft": (1, 2)}, swap_requests=2, swap_tokens=120,
    memory=0.1, engine={"max_num_batched_tokens": 512},
)  # fmt: skip
# To try the program: vLLM's CPU build compiles nothing here; a GPU's captures as it does at scale.
SMALL_ENGINE: dict[bool, dict[str, Any]] = {
    False: {"enforce_eager": True}, True: {"kv_cache_memory_bytes": 2**30},
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    model: Path
    told: dict[str, Any]
    has_plugin: bool = True


@dataclass(frozen=True)
class Case:
    name: str
    variants: Callable[[Scale, Path, Path], dict[str, Variant]]
    turns: tuple[tuple[str, ...], ...]  # variants that are measured in turns, group after group
    swapping: str = ""  # the variant that takes another head, when the first group is done
    collecting: str = ""
    has_head_apart: bool = False

    def model(self, models: Path) -> Path:
        return models / f"plugin-{self.name}"

    def trunk(self, models: Path) -> Path:
        return models / f"plugin-{self.name}-trunk"

    def cycle(self, models: Path) -> Path:
        return models / f"plugin-{self.name}-cycle.json"

    def other_head(self, work: Path) -> Path:
        return work / "always-right"


def write_models(case: Case, scale: Scale, models: Path) -> None:
    """What of a case's models is not there yet."""
    if case.cycle(models).exists():
        return
    models.mkdir(parents=True, exist_ok=True)
    write = partial(
        write_quickly, scale.shapes[case.name], None, rate=scale.rate, active=scale.active
    )
    if case.has_head_apart:  # vLLM's class of the trunk has no place for one
        write(case.model(models), keeps=is_of_head)
        write(case.trunk(models), keeps=is_of_trunk)
    else:
        write(case.model(models))
    following = agreement_of(case.model(models)).following.tolist()
    case.cycle(models).write_text(json.dumps(following))


def is_of_head(name: str) -> bool:
    return name.startswith("mtp.")


def is_of_trunk(name: str) -> bool:
    return not is_of_head(name)


def _vocab_variants(scale: Scale, models: Path, work: Path) -> dict[str, Variant]:
    model = VOCAB.model(models)
    size = shape_config(scale.shapes["vocab"])["vocab_size"]
    file = work / "vocab.json"
    # The tokens in use begin with 2.
    write([DraftVocab.of(range(2, scale.active + 2), vocab_size=size)], file)
    always_right(model, VOCAB.other_head(work))
    asked = {"draft_vocab": str(file)}
    spec = {"method": "mtp", "num_speculative_tokens": scale.drafts}
    choosing = {**spec, "use_local_argmax_reduction": True}

    def plugin(**more: Any) -> dict[str, Any]:
        return {"speculative_config": choosing, "additional_config": {"headstart": asked | more}}

    collecting = plugin(collect=str(work / "collected"))
    return {
        "stock": Variant(model, {"speculative_config": spec}, has_plugin=False),
        "vocab": Variant(model, {**plugin(), "worker_extension_cls": EXTENSION}),
        "int8": Variant(model, plugin(draft_rows="int8")),
        "collect": Variant(model, {**collecting, "worker_cls": WORKER}),
    }


def always_right(model: Path, out: Path) -> None:
    """The model's head with what makes its mistakes left out of the fusion (see Agreement)."""
    head = head_in(open_model(model))
    changed = {}
    for name, source in head.tensors.items():
        value = load(source)
        if name.endswith(".fuse.weight"):
            value = value.clone()
            value[len(value) // 2 :] = 0  # outputs of the half that holds mistaken tokens
        published = head.family.keys.to_published(name, head.naming())
        changed[published] = value.contiguous()
    out.mkdir()
    save_file(changed, out / "head.safetensors")


def _graft_variants(scale: Scale, models: Path, work: Path) -> dict[str, Variant]:
    model, trunk = GRAFT.model(models), GRAFT.trunk(models)
    head, own = work / "head", work / "own"
    found = open_head(model)
    plan_export(found, "vllm").write(head)
    # The same tensors under our names, for our class.
    plan_export(found, "headstart").write(own)
    config = {**found.config, "architectures": [PLUGIN], "model_type": PLUGIN_TYPE, COUNT: 1,
              KEY: {"family": found.family.name}}  # fmt: skip
    (own / "config.json").write_text(json.dumps(config))
    spec = {"method": "mtp", "num_speculative_tokens": scale.drafts}
    return {
        "stock-class": Variant(
            trunk,
            {
                "speculative_config": {**spec, "model": str(head)},
                "hf_overrides": overrides(found.family, STOCK),
            },
            has_plugin=False,
        ),
        "own-class": Variant(trunk, {"speculative_config": {**spec, "model": str(own)}}),
    }


VOCAB = Case(
    "vocab", _vocab_variants, turns=(("stock", "vocab", "int8"), ("vocab", "collect")),
    swapping="vocab", collecting="collect",
)  # fmt: skip
GRAFT = Case(
    "graft", _graft_variants, turns=(("stock-class", "own-class"),), has_head_apart=True
)  # fmt: skip
CASES = {case.name: case for case in (VOCAB, GRAFT)}
