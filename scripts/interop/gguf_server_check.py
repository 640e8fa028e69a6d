"""The files of gguf_check.py in llama.cpp's own programs.

`llama-server` must say the same tokens and count the same drafts at every depth for the file that
llama.cpp's converter made, for its trunk with the head that we put in, and for its trunk beside our
files with the head alone; heads with exchanged halves or norms shifted twice must be counted
otherwise. `llama-quantize` must make of the converter's file what it makes of our head.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from llama_cpp_server import served

from headstart.checkpoint.gguf.values import byte_blocks
from headstart.checkpoint.source import stored
from headstart.heads.formats import open_head, open_target
from headstart.heads.formats.gguf import GgufModel, open_gguf
from headstart.heads.stitch import plan_stitch

DEPTH = 3
KINDS = {"Q4_K": "Q4_K_S", "Q6_K": "Q6_K"}


def only(folder: Path) -> Path:
    [path] = folder.glob("*.gguf")
    return path


def check_served(family: str, programs: Path, work: Path) -> list[str]:
    program = programs / "llama-server"
    config = json.loads((work / "model/config.json").read_text())
    vocab = config.get("text_config", config)["vocab_size"]
    trunk = work / "trunk.gguf"
    files: dict[str, tuple[Path, Path | None]] = {
        "theirs": (work / "whole.gguf", None),
        "theirs, alone": (trunk, work / "alone.gguf"),
        "ours": (only(work / "stitched"), None),
        "ours, alone": (trunk, only(work / "draft")),
        "ours, own keys": (trunk, only(work / "own")),
        "halves": (only(work / "halves-stitched"), None),
        "norms": (only(work / "norms-stitched"), None),
    }
    plain = served(program, trunk, 0, vocab, work / "plain.log").tokens
    found = {}
    for name, (model, draft) in files.items():
        log = work / f"{name.replace(', ', '-').replace(' ', '-')}.log"
        found[name] = served(program, model, DEPTH, vocab, log, draft)
        print(f"{family:18} {name:15} {found[name].counters}", flush=True)
    failures = [f"{family}: {n}: other tokens" for n, each in found.items() if each.tokens != plain]
    right = found["theirs"].counters
    for name, each in found.items():
        is_control = name in ("halves", "norms")
        if (each.counters == right) == is_control:
            failures.append(f"{family}: {name}: counters {each.counters}, llama.cpp's own {right}")
    return failures


def check_quantised(family: str, programs: Path, work: Path) -> list[str]:
    """K-quants of the head beside those that the tool makes of the whole file."""
    failures = []
    os.environ["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
    for kind, name in KINDS.items():
        whole = work / f"whole-{kind}.gguf"
        words = [programs / "llama-quantize", "--pure", work / "whole.gguf", whole, name]
        subprocess.run([str(word) for word in words], check=True, capture_output=True)
        head, trunk = open_head(work / "model"), open_target(work / "trunk.gguf")
        plan_stitch(head, trunk, head_type=kind.lower()).write(work / f"stitched-{kind}")
        ours, theirs = open_gguf(only(work / f"stitched-{kind}")), open_gguf(whole)
        made = [n for n, i in ours.tensors.items() if i.dtype == kind]
        wrong = [n for n in made if theirs.tensors[n].dtype == kind and _differ(ours, theirs, n)]
        print(f"{family:18} {kind}: {len(made)} tensors of the head", flush=True)
        failures += [f"{family}: {kind}: {each} differs" for each in wrong]
        failures += [] if made else [f"{family}: {kind}: no tensor of it"]
    return failures


def _differ(ours: GgufModel, theirs: GgufModel, name: str) -> bool:
    one, other = (
        b"".join(byte_blocks(stored(model.tensors[name]), 1 << 24)) for model in (ours, theirs)
    )
    return one != other
