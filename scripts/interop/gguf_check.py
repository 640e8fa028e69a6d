"""Our GGUF files beside those of llama.cpp's converter, and what its library makes of both.

    python scripts/interop/gguf_check.py --tree DIR --libs DIR [--programs DIR]

DIR of --tree is llama.cpp's source tree, DIR of --libs its libraries (`llama_cpp_library.py` says
which), DIR of --programs has llama-server and llama-quantize (`gguf_server_check.py` says what is
asked of them). For every family a tiny checkpoint is converted by llama.cpp: whole, without its
head, and the head alone. Ours is the head stitched into the second, and exported alone: with the
second's keys, and with keys that we make of the config. Every tensor and key must be the same;
where llama.cpp drafts with the family, tokens and all logits of trunk and head must be the same,
bit for bit, and heads with exchanged halves or norms shifted twice must differ.

Prints a table, exits 1 on any failure.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from checkpoints import shift_norms, swap_fusion_halves, with_changed_head
from gguf_server_check import check_quantised, check_served

from headstart.calibrate.tiny import write_tiny
from headstart.checkpoint.gguf.values import byte_blocks
from headstart.heads.export import plan_export
from headstart.heads.formats import open_head, open_target
from headstart.heads.formats.gguf import open_gguf
from headstart.heads.formats.gguf.found import spelled_in
from headstart.heads.formats.gguf.spelling import SpelledHead
from headstart.heads.stitch import plan_stitch

_HERE = Path(__file__).parent
_TOKENS = (3, 17, 42, 99, 5, 8, 61)
_NUM_TOKENS = 40
# llama.cpp wants a sliding layer in the trunk, too.
_SLIDING = {
    "layer_types": [f"{kind}_attention" for kind in ("full", "sliding", "full", *["sliding"] * 3)],
    "partial_rotary_factors": [0.5, 1.0, 0.5, 1.0, 1.0, 1.0],
}
# variant -> changes of its tiny config, and whether llama.cpp converts heads and trunks apart
FAMILIES: dict[str, tuple[dict[str, Any], bool]] = {
    "qwen3_5_text": ({}, True),
    "qwen3_5_moe_text": ({}, True),
    "qwen3_next": ({}, True),
    "glm4_moe_lite": ({}, True),
    "deepseek_v32": ({}, True),
    "glm_moe_dsa": ({}, True),
    "step3p5": (_SLIDING, True),
    "nemotron_h": ({"norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1}, True),
    "glm4_moe": ({}, False),
    "mimo_v2": ({"swa_head_dim": 64, "sliding_window": 128}, False),
}
# Tensors whose type differs on purpose: the converter misses that this one is a router.
OTHER_TYPE = {("nemotron_h", "ffn_gate_inp.weight")}
# llama.cpp does not load the tiny trunk, whichever converter wrote it.
NOT_RUN = ("nemotron_h",)
# Keys that say nothing about the model, or that the stand-in for tokenizers has no part in.
OTHER_KEYS = (
    "general.name", "general.size_label", "general.sampling.temp", "general.sampling.top_k",
    "general.sampling.top_p", "tokenizer.ggml.pre", "headstart.head",
)  # fmt: skip
_END = 5  # the token that ends a text, in all these files


def convert(tree: Path, model: Path, work: Path, kinds: dict[str, list[str]]) -> None:
    words: list[Any] = [sys.executable, _HERE / "llama_cpp_convert.py", tree, _END]
    for number, (name, options) in enumerate(kinds.items()):
        words += ["--"] if number else []
        words += [model, work / f"{name}.gguf", "--outtype", "bf16", *options]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"llama.cpp's converter failed: {done.stderr.strip().splitlines()[-1]}")


def differing(family: str, ours: SpelledHead, theirs: SpelledHead) -> list[str]:
    if ours.tensors.keys() != theirs.tensors.keys():
        return [f"other names: {ours.tensors.keys() ^ theirs.tensors.keys()}"]
    return [
        name
        for (module, name), source in ours.tensors.items()
        if (family, name) not in OTHER_TYPE
        and _content(source) != _content(theirs.tensors[module, name])
    ]


def _content(source: Any) -> tuple[Any, ...]:
    return source.dtype, source.shape, b"".join(byte_blocks(source, 1 << 24))


def give_tokenizer(model: Path) -> None:
    """The tokenizer that llama_cpp_convert.py puts in the place of every one."""
    config = json.loads((model / "config.json").read_text())
    words = {f"t{i}": i for i in range(config.get("text_config", config)["vocab_size"])}
    inner = {"type": "BPE", "vocab": words, "merges": ["t 2"]}
    settings = {"bos_token": f"t{_END}", "eos_token": f"t{_END}", "add_bos_token": False}
    (model / "tokenizer.json").write_text(json.dumps({"model": inner, "added_tokens": []}))
    (model / "tokenizer_config.json").write_text(json.dumps(settings))


def other_keys(ours: Path, theirs: Path) -> list[str]:
    one, other = (
        {k: (f.kind, f.value) for k, f in open_gguf(path).fields.items() if k not in OTHER_KEYS}
        for path in (ours, theirs)
    )
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))


def drafted(libs: Path, target: Path, draft: Path) -> dict[str, Any]:
    words = [sys.executable, _HERE / "llama_cpp_library.py", libs, target, draft, _NUM_TOKENS]
    done = subprocess.run([str(w) for w in (*words, *_TOKENS)], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"failed": f"{done.returncode}: {last}"}
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def only(folder: Path) -> Path:
    [path] = folder.glob("*.gguf")
    return path


def check(family: str, tree: Path, libs: Path, work: Path, programs: Path | None) -> list[str]:
    changes, is_apart = FAMILIES[family]
    model = write_tiny(family, work / "model", **changes)
    give_tokenizer(model)
    kinds = {"whole": [], "trunk": ["--no-mtp"], "alone": ["--mtp"]}
    convert(tree, model, work, kinds if is_apart else {"whole": []})
    whole = work / "whole.gguf"
    trunk = open_target(work / "trunk.gguf" if is_apart else whole)
    head = open_head(model)
    plan_stitch(head, trunk).write(work / "stitched")
    plan_export(head, "gguf", trunk=trunk).write(work / "draft")
    stitched, draft = only(work / "stitched"), only(work / "draft")
    failures = []
    alone = work / "alone.gguf"
    pairs = {"stitched": (stitched, whole), "draft": (draft, alone)}
    if is_apart and family not in NOT_RUN:
        plan_export(head, "gguf").write(work / "own")
        pairs["own"] = only(work / "own"), alone
        failures += [f"{family}: {key} differs" for key in other_keys(pairs["own"][0], alone)]
    for name, (ours, theirs) in pairs.items():
        if theirs.exists():
            wrong = differing(family, spelled_in(open_gguf(ours)), spelled_in(open_gguf(theirs)))
            failures += [f"{family}: {name}: {each} differs" for each in wrong]
    if not is_apart or family in NOT_RUN:
        print(f"{family:18} bytes {'equal' if not failures else 'DIFFER'}, not run", flush=True)
        return failures
    runs = {
        "theirs": drafted(libs, whole, whole),
        "ours": drafted(libs, stitched, stitched),
        "ours, alone": drafted(libs, work / "trunk.gguf", draft),
        "ours, own keys": drafted(libs, work / "trunk.gguf", pairs["own"][0]),
    }
    for name, found in runs.items():
        if "failed" in found or found != runs["theirs"]:
            failures.append(f"{family}: {name}: {found.get('failed', 'other logits')}")
    controls = {"halves": swap_fusion_halves, "norms": shift_norms}
    rates = []
    for name, change in controls.items():
        changed = with_changed_head(model, work / name, change)
        plan_stitch(open_head(changed), trunk).write(work / f"{name}-stitched")
        found = drafted(libs, only(work / f"{name}-stitched"), only(work / f"{name}-stitched"))
        rates.append(f"{name} {found.get('right', '-')}")
        if found.get("head") == runs["theirs"].get("head"):
            failures.append(f"{family}: the control {name} is not noticed")
    if programs is not None:
        failures += check_served(family, programs, work)
        failures += check_quantised(family, programs, work)
    right = f"{runs['ours'].get('right')} of {runs['ours'].get('of')}"
    said = "equal" if not failures else "DIFFER"
    print(f"{family:18} bytes and logits {said}, right {right}; {', '.join(rates)}", flush=True)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tree", type=Path, required=True)
    parser.add_argument("--libs", type=Path, required=True)
    parser.add_argument("--programs", type=Path)
    parser.add_argument("--work", type=Path, default=Path(".interop/work"))
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    options = parser.parse_args()
    failures = []
    for family in options.families:
        work = (options.work / f"gguf-{family}").resolve()
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        try:
            failures += check(
                family, options.tree.resolve(), options.libs.resolve(), work,
                options.programs and options.programs.resolve(),
            )  # fmt: skip
        except RuntimeError as error:
            failures.append(f"{family}: {error}")
    print("\n".join([*failures, f"{len(options.families)} checked, {len(failures)} failures"]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
