"""Our engine against the real vLLM on the CPU: tokens, and draft counters at every depth.

For each family a tiny checkpoint whose head agrees with its trunk some of the time is run by both,
without and with drafts, ours with the layout that vLLM computes (`layout="vllm"`). Tokens and
counters must be the same (in BF16 counters nearly); with the halves of the head's fusion swapped
ours must be far off. `demo` is the demo's model with its head, asked what the demo asks.

Prints a table, writes JSON with --json, exits 1 on any failure.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import own_engine
import torch
from checking import check_all
from checkpoints import swap_fusion_halves, with_changed, with_changed_head
from environments import python_of
from vllm_engine import Engine as Vllm
from vllm_engine import EngineFailed, Served

from headstart import demo
from headstart.calibrate.tiny import write_tiny
from headstart.checkpoint.reader import Checkpoint
from headstart.data.prompt_reader import PromptReader
from headstart.demo import PROMPTS
from headstart.engine.engine import Engine
from headstart.errors import HeadstartError

DEPTHS = (1, 3)
DEMO = "demo"
# What the tiny checkpoint of a family is made with.
FAMILIES: dict[str, dict[str, Any]] = {
    "mimo": {"dtype": "F32"},
    "glm4_moe": {"dtype": "F32"},
    "glm4_moe_lite": {"dtype": "F32"},
    # Stretched positions, as its releases have.
    "deepseek_v3": {
        "dtype": "F32",
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "ernie4_5_moe": {"dtype": "F32"},
    "qwen3_5_text": {"dtype": "BF16"},
    "qwen3_5_moe_text": {"dtype": "BF16"},
    "qwen3_next": {"dtype": "BF16"},
    # Not Nemotron-H, whose experts have no gates, nor MiMo-V2, whose values have a size of their
    # own: vLLM 0.32 has kernels of both for GPUs only.
    "exaone_moe": {"dtype": "F32"},
    "exaone4_5": {"dtype": "F32"},
    # Latents of the size that vLLM has kernels for. Where a config has no layer_types, it attends
    # to everything and not to index_topk tokens, so all of them are chosen here.
    "hy_v4": {
        "dtype": "F32",
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "index_head_dim": 128,
        "index_topk": 256,
    },
    DEMO: {"dtype": "F32"},
}
# vLLM's CPU kernel for gated delta nets takes BF16 only; there its own counters differ by one or
# two from one run to the next.
APART = {"F32": 0, "BF16": 3}
# family -> what vLLM 0.32 leaves out on CPUs: a part of the tensors' names, a value without effect
LEFT_OUT = {
    # where scores are a softmax without groups
    "ernie4_5_moe": ("correction_bias", 0.0),
    # no attention of its CPU build takes sinks, which its log says
    "hy_v4": ("learnable_sink_param", -100.0),
}
# family -> fields of the text part that vLLM's head asks the whole model's config for
OUTER = {"exaone4_5": ("vocab_size", "num_nextn_predict_layers")}
# Its CPU kernel for rotations takes queries as if they lay densely; those of latent attention are
# the ends of longer rows. Without the kernel it rotates in torch.
PLAIN_ROTATION = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
# Its CPU kernel for gated delta nets takes states in FP32, which 0.28 does not see to by itself.
FLOAT_STATES = {"mamba_ssm_cache_dtype": "float32"}
# family -> what vLLM is started with
OPTIONS: dict[str, dict[str, Any]] = {
    # its text part alone
    "exaone4_5": {"skip_tokenizer_init": False, "language_model_only": True},
    "glm4_moe_lite": PLAIN_ROTATION,
    "hy_v4": PLAIN_ROTATION,
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), FLOAT_STATES),
}


@dataclass
class Row:
    """One depth: (drafts, accepted at depth 1, 2, ...), cumulative."""

    depth: int
    ours: tuple[int, ...]
    vllm: tuple[int, ...]
    same_tokens: bool
    control: tuple[int, ...]  # ours with fusion halves swapped


@dataclass
class Result:
    family: str
    dtype: str
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    seconds: int = 0

    def expect(self, is_true: bool, claim: str) -> None:
        if not is_true:
            self.failures.append(claim)
            print(f"FAILED {self.family}: {claim}", flush=True)


def ours(model: Path, depth: int, prompts: list[list[int]] | None = None) -> Served:
    """What our engine says to vLLM's prompts, in fp32, counted as vLLM counts."""
    engine = Engine(model, device="cpu", dtype="float32", speculate=depth, layout="vllm")
    return own_engine.served(own_engine.generate(engine, depth, prompts), depth)


def apart(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def make_model(family: str, out: Path, **changes: Any) -> Path:
    if family == DEMO:
        return demo.folder()
    model = write_tiny(family, out, **FAMILIES[family], **changes)
    if family in OUTER:
        file = model / "config.json"
        config = json.loads(file.read_text())
        config |= {name: config["text_config"][name] for name in OUTER[family]}
        file.write_text(json.dumps(config))
    if family not in LEFT_OUT:
        return model
    part, neutral = LEFT_OUT[family]

    def without(name: str, value: torch.Tensor) -> torch.Tensor:
        return torch.full_like(value, neutral) if part in name else value

    return with_changed(model, out.with_name("without"), without)


def questions(model: Path) -> list[list[int]]:
    reader = PromptReader(Checkpoint.open(model))
    return [reader.read([{"role": "user", "content": text}]) for text in PROMPTS.values()]


def check(family: str, python: Path, work: Path, versions: dict[str, str]) -> Result:
    result = Result(family, FAMILIES[family]["dtype"])
    model = make_model(family, work / "model")
    swapped = with_changed_head(model, work / "swapped", swap_fusion_halves)
    prompts = questions(model) if family == DEMO else None
    plain = ours(model, 0, prompts).tokens
    with Vllm(python, work / "vllm.log", work) as vllm:
        versions.update(vllm.versions)
        options = OPTIONS.get(family, {})
        theirs = vllm.serve(model, 0, result.dtype, prompts, **options)
        result.expect(theirs.tokens == plain, "K=0: tokens differ")
        for depth in DEPTHS:
            theirs = vllm.serve(model, depth, result.dtype, prompts, **options)
            own, control = ours(model, depth, prompts), ours(swapped, depth, prompts).counters
            same = plain == theirs.tokens == own.tokens
            row = Row(depth, own.counters, theirs.counters, same, control)
            result.rows.append(row)
            print(f"{family:17} K={depth}  {row.ours} {row.vllm} swapped {control}", flush=True)
            result.expect(same, f"K={depth}: tokens differ")
            most = APART[result.dtype]
            result.expect(apart(row.ours, row.vllm) <= most, f"K={depth}: {row.ours} {row.vllm}")
            result.expect(apart(control, row.vllm) > 20, f"K={depth}: the control counts the same")
            rate = own.accepted[0] / own.drafts
            result.expect(0.2 <= rate <= 0.9, f"K={depth}: acceptance {rate:.2f} at depth 1")
            result.expect(0 < own.accepted[-1] < own.drafts, f"K={depth}: no bonus or no recovery")
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--envs", type=Path, default=Path(".interop"))
    parser.add_argument("--work", type=Path, default=Path(".interop/work"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", choices=FAMILIES, default=[])
    options = parser.parse_args()
    python = python_of(options.envs, "vllm")
    return check_all(
        options.only or FAMILIES,
        lambda family, work, versions: check(family, python, work, versions),
        lambda family, error: Result(family, "", failures=[error]),
        errors=(EngineFailed, HeadstartError),
        folder=lambda family: options.work / f"engine-{family}",
        out=options.json,
    )


if __name__ == "__main__":
    sys.exit(main())
