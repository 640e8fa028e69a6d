"""Our MLX drafter folders beside those of mlx-vlm's `split_mtp`.

    python scripts/interop/mlx_check.py --site DIR

DIR holds mlx, mlx-cpu and mlx-vlm, installed or unpacked from their wheels (they need no more than
our own environment has). Tensors and configs must be the same, and mlx-vlm must load ours.

Prints a table, exits 1 on any failure.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from checkpoints import differences

from headstart.calibrate.tiny import tiny_config, write_tiny
from headstart.heads.export import plan_export
from headstart.heads.formats import open_head

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "glm4_moe_lite", "glm_moe_dsa")
NOT_LOADED = ("glm4_moe_lite",)  # mlx-vlm 0.7.10 does not load its own folder either
# Copies that split_mtp keeps, with which mlx-vlm 0.7.10 does not load its folder.
_COPIES = ("mtp.embed_tokens.weight", "mtp.shared_head.head.weight")
_LOAD = """
import sys
from pathlib import Path
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_vlm.speculative.drafters import load_drafter
found = load_drafter(sys.argv[1])
model = found[0] if isinstance(found, tuple) else found
mx.eval(model.parameters())
print(len(tree_flatten(model.parameters())))
"""


def theirs(site: Path, *words: str | Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    return done.stdout


def check(family: str, site: Path, work: Path) -> list[str]:
    fields = tiny_config(family).get("text_config", {})
    changes: dict[str, Any] = {}
    if "rope_parameters" in fields:  # as releases have it
        more = {"type": "default", "mrope_section": [4, 2, 2]}
        changes = {"rope_parameters": {**fields["rope_parameters"], **more}}
    if family == "glm_moe_dsa":  # what its class asks for
        rope = {"rope_theta": 10000.0, "rope_type": "default"}
        changes = {"rope_parameters": rope, "attention_bias": False}
    model = write_tiny(family, work / "model", **changes)
    split = ("-m", "mlx_vlm.split_mtp", "--model", model, "--output", work / "theirs")
    theirs(site, *split)
    plan_export(open_head(model), "mlx").write(work / "ours")
    other = [n for n in differences(work / "theirs", work / "ours") if n not in _COPIES]
    failures = [f"{family}: {name} differs" for name in other]
    one, other = (json.loads((work / n / "config.json").read_text()) for n in ("theirs", "ours"))
    if one != other:
        failures.append(f"{family}: the configs differ")
    said = "not loaded"
    if family not in NOT_LOADED:
        said = f"loaded: {theirs(site, '-c', _LOAD, work / 'ours').split()[-1]} parameters"
    print(f"{family:14} {'equal' if not failures else 'DIFFER'}, {said}", flush=True)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--site", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path(".interop/work"))
    options = parser.parse_args()
    failures = []
    for family in FAMILIES:
        work = (options.work / f"mlx-{family}").resolve()
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        try:
            failures += check(family, options.site.resolve(), work)
        except RuntimeError as error:
            failures.append(f"{family}: {error}")
    print("\n".join([*failures, f"{len(FAMILIES)} checked, {len(failures)} failures"]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
