"""Models that the real mlx-lm converted, in our engine beside mlx itself.

    python scripts/interop/mlx_engine_check.py --site DIR

DIR holds mlx, mlx-cpu and mlx-lm. Tiny checkpoints of every family that both run are converted in
float32, plain and to 4 bits in groups of 64. Logits must be those of mlx-lm, up to the order in
which sums are taken.

Prints a table, exits 1 on any failure.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from gguf_check import _SLIDING
from mlx_check import theirs

from headstart.calibrate.tiny import tiny_config, write_tiny
from headstart.heads.formats import open_runnable
from headstart.models.build import build
from headstart.models.documents import Documents
from headstart.models.unroll import trunk_states

_IDS = [3, 4, 5, 6, 7, 9, 11]
_LOOK = """
import json, sys
from pathlib import Path
import mlx.core as mx
from mlx_lm.utils import load_model
model, _ = load_model(Path(sys.argv[1]))
found = model(mx.array([json.loads(sys.argv[2])]))[0].astype(mx.float32)
print('FOUND ' + json.dumps(found.tolist()))
"""
# variant -> changes of its tiny config, where mlx-lm insists on fields or has other defaults
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {}, "qwen3": {}, "mimo": {}, "qwen3_5": {}, "qwen3_next": {},
    "glm4_moe": {"rope_scaling": None}, "glm4_moe_lite": {}, "deepseek_v3": {}, "deepseek_v32": {},
    "glm_moe_dsa": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "attention_bias": False,
    },
    "step3p5": {
        **_SLIDING, "moe_router_scaling_factor": 1.0, "norm_expert_weight": True,
        "rope_theta": [10000.0] * 6,
    },
    "mimo_v2": {
        "add_full_attention_sink_bias": False, "swa_head_dim": 64, "n_shared_experts": None,
    },
}  # fmt: skip
_WITHOUT_HEAD = ("llama", "qwen2", "qwen3", "deepseek_v3")
_KINDS: dict[str, list[str]] = {"plain": [], "q4": ["-q", "--q-bits", "4", "--q-group-size", "64"]}
_TOLERANCE = 1e-4


def _changes(variant: str) -> dict[str, Any]:
    if not variant.startswith(("qwen3_5", "qwen3_next")):
        return FAMILIES[variant]
    config = tiny_config(variant)
    fields = config.get("text_config", config)
    share = {"partial_rotary_factor": fields.get("partial_rotary_factor", 0.25)}
    rope = {"type": "default", "mrope_section": [4, 2, 2], "rope_theta": 10000.0}
    return {"rope_parameters": {**rope, **fields.get("rope_parameters", share)}}


def _ours(folder: Path) -> torch.Tensor:
    built = build(open_runnable(folder), device="cpu", dtype="float32", max_model_len=64)
    ids = torch.tensor(_IDS)
    states = trunk_states(built.trunk, ids, Documents((len(ids),)), "after_final_norm")
    return built.trunk.logits(states)


def check(variant: str, site: Path, work: Path) -> list[str]:
    has_head = variant not in _WITHOUT_HEAD
    model = write_tiny(variant, work / "model", with_head=has_head, **_changes(variant))
    failures, said = [], []
    for kind, options in _KINDS.items():
        words = ["--hf-path", str(model), "--mlx-path", str(work / kind), "--dtype", "float32"]
        theirs(site, "-m", "mlx_lm", "convert", *words, *options)
        lines = theirs(site, "-c", _LOOK, work / kind, json.dumps(_IDS)).splitlines()
        [line] = [each for each in lines if each.startswith("FOUND ")]
        wanted = torch.tensor(json.loads(line.removeprefix("FOUND ")))
        difference = float((_ours(work / kind) - wanted).abs().max())
        said.append(f"{kind} {difference:.1e} of {float(wanted.abs().max()):.1f}")
        if not difference < _TOLERANCE:
            failures.append(f"{variant}, {kind}: logits differ by {difference:.3g}")
    print(f"{variant:16} {'; '.join(said)}", flush=True)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--site", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path(".interop/work"))
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    options = parser.parse_args()
    failures = []
    for variant in options.families:
        work = (options.work / f"mlx-engine-{variant}").resolve()
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        try:
            failures += check(variant, options.site.resolve(), work)
        except RuntimeError as error:
            failures.append(f"{variant}: {error}")
    print("\n".join([*failures, f"{len(options.families)} checked, {len(failures)} failures"]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
