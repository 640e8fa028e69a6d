"""Heads that we put into models of MLX, read by the real mlx, mlx-lm and mlx-vlm.

    python scripts/interop/mlx_model_check.py --site DIR

DIR holds mlx, mlx-cpu, mlx-lm and mlx-vlm. mlx-lm converts tiny checkpoints, plain and to 4 bits,
which drops their heads. Restored in every layout, and quantised to 8 bits, the trunk's logits must
be what they were; mlx-vlm must load the heads that it looks for, with the same values; what mlx
dequantises must be what we dequantise; and our quantised drafters must be those of `split_mtp`.

Prints a table, exits 1 on any failure.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from checkpoints import differences
from mlx_check import theirs

from headstart.calibrate.tiny import tiny_config, write_tiny
from headstart.heads.export import plan_export
from headstart.heads.formats import open_any, open_head
from headstart.heads.formats.mlx_drafters import DRAFTERS
from headstart.heads.stitch import plan_restore

FAMILIES = ("qwen3_5", "qwen3_next")
# Runs beside mlx: digests of the trunk's logits, and of the head that mlx-vlm loads.
_LOOK = """
import hashlib, json, sys
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_vlm.speculative.drafters import load_drafter

def digest(arrays):
    text = hashlib.sha256()
    for name, value in sorted(arrays.items()):
        text.update(name.encode() + bytes(memoryview(value.astype(mx.float32))))
    return text.hexdigest()[:16]

def plain(found):
    result = {}
    for name, value in found.items():
        if name.endswith('.weight') and name[:-6] + 'scales' in found:
            parts = found[name[:-6] + 'scales'], found[name[:-6] + 'biases']
            bits = value.shape[-1] * 32 // (parts[0].shape[-1] * 64)
            value = mx.dequantize(value, *parts, group_size=64, bits=bits)
        if not name.endswith(('.scales', '.biases')):
            result[name] = value
    return result

for folder in sys.argv[1:]:
    found = {}
    try:
        model, _ = load(folder)
        found['trunk'] = digest({'logits': model(mx.array([[3, 4, 5, 6, 7]]))})
    except Exception as error:
        found['trunk'] = f'{type(error).__name__}: {error}'[:200]
    try:
        drafter, _ = load_drafter(folder)
        found['head'] = digest(plain(dict(tree_flatten(drafter.parameters()))))
    except Exception as error:
        found['head'] = f'{type(error).__name__}: {error}'[:200]
    print('FOUND ' + json.dumps(found))
"""


def look(site: Path, *folders: Path) -> list[dict[str, str]]:
    lines = theirs(site, "-c", _LOOK, *folders).splitlines()
    return [json.loads(line.removeprefix("FOUND ")) for line in lines if line[:6] == "FOUND "]


def checkpoint(family: str, out: Path) -> Path:
    config = tiny_config(family)
    fields = config.get("text_config", config)
    rope = {"type": "default", "mrope_section": [4, 2, 2], "rope_theta": 10000.0}
    share = {"partial_rotary_factor": fields.get("partial_rotary_factor", 0.25)}
    given = fields.get("rope_parameters", share)
    return write_tiny(family, out, rope_parameters={**rope, **given})


def check(family: str, site: Path, work: Path) -> list[str]:
    model = checkpoint(family, work / "model")
    head = open_head(model)
    plan_export(head, "mlx").write(work / "drafter")
    failures: list[str] = []
    for kind, options in (("plain", []), ("q4", ["-q", "--q-bits", "4", "--q-group-size", "64"])):
        bare = work / kind
        theirs(site, "-m", "mlx_lm", "convert", "--hf-path", model, "--mlx-path", bare, *options)
        places = {}
        for layout in DRAFTERS[head.family.name].layouts:
            places[layout] = work / f"{kind}-{layout}"
            plan_restore(open_any(bare), head.origin, head, mlx_layout=layout).write(places[layout])
        places["q8"] = work / f"{kind}-q8"
        plan_restore(open_any(bare), head.origin, head, head_type="q8").write(places["q8"])
        first, drafter, *rest = look(site, bare, work / "drafter", *places.values())
        for name, found in zip(places, rest, strict=True):
            if found["trunk"] != first["trunk"]:
                failures.append(f"{family}, {kind}, {name}: trunk {found['trunk']}")
            if name in ("sidecar", "embedded") and found["head"] != drafter["head"]:
                failures.append(f"{family}, {kind}, {name}: head {found['head']}")
        # What mlx dequantises of the 8 bits, beside what we dequantise of them.
        plan_export(open_head(places["q8"]), "headstart").write(work / f"{kind}-back")
        plan_export(open_head(work / f"{kind}-back"), "mlx").write(work / f"{kind}-drafter")
        [again] = look(site, work / f"{kind}-drafter")
        if rest[-1]["head"] != again["head"] or again["head"] == drafter["head"]:
            failures.append(f"{family}, {kind}: dequantised {again['head']}, {rest[-1]['head']}")
    split = ("-m", "mlx_vlm.split_mtp", "--model", model, "--output", work / "theirs-q4")
    theirs(site, *split, "--q-bits", "4", "--q-group-size", "64")
    plan_export(head, "mlx", head_type="q4").write(work / "ours-q4")
    wrong = differences(work / "theirs-q4", work / "ours-q4")
    failures += [f"{family}: quantised {name} differs" for name in wrong]
    one, other = (
        json.loads((work / n / "config.json").read_text()) for n in ("theirs-q4", "ours-q4")
    )
    failures += [] if one == other else [f"{family}: the configs of quantised drafters differ"]
    print(f"{family:14} {'equal' if not failures else 'DIFFER'}", flush=True)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--site", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path(".interop/work"))
    options = parser.parse_args()
    failures = []
    for family in FAMILIES:
        work = (options.work / f"mlx-model-{family}").resolve()
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
