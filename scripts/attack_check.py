"""Repeat the attacks of the security review with counts: what is promised in SECURITY.md holds.

    python scripts/attack_check.py [--full] [--only NAME ...] [--out FOLDER]

Kills with -9, full disks, odd files, malformed headers, hostile names, launch scripts, chat
templates that want out, and attacks on a live server while others keep asking it. A promise is
broken by a traceback, half a result, a file that was touched elsewhere, a key in a log, or others
that wait more than twice their usual time (by the median).
Others' times mean most with a model of a real size (--model): an answer of the tiny one is nearly
all Python, which attacks then share with it.
Needs the development dependencies and no GPU; five minutes, with --full about half an hour on two
cores. Ends with 1 if a promise was broken. With --out it writes a dated result as JSON and as a
table; runs of one day with --only are put together.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from attacks import files, headers, kills, server
from attacks.outcome import Outcome, support

from headstart.bench.environment import processor_name

QUICK = {"kills": 3, "disks": 16, "per_file": 4, "methods": 2000, "connections": 100, "chats": 8}
FULL = {"kills": 27, "disks": 100, "per_file": 40, "methods": 20_000, "connections": 500,
        "chats": 40}  # fmt: skip
GROUPS = ("kills", "disks", "files", "headers", "names", "scripts", "templates", "server")


def attacked(
    work: Path, counts: dict[str, int], only: list[str], model: Path | None
) -> list[Outcome]:
    """Every group of attacks, in turn."""
    outcomes = []
    template = kills.prepare(work / "template")

    def copy(name: str) -> Path:
        return Path(shutil.copytree(template, work / name, symlinks=True))

    if "kills" in only:
        outcomes.append(kills.kills(copy("kills"), counts["kills"], say))
    if "disks" in only:
        outcomes.append(kills.full_disks(copy("disks"), counts["disks"]))
    if "files" in only:
        outcomes.append(files.odd_files(template, work / "trial", counts["per_file"], say))
    if "names" in only:
        outcomes.append(files.hostile_names(template, work / "names"))
    if "scripts" in only:
        outcomes.append(files.launch_scripts(template, work / "scripts"))
    if "headers" in only:
        outcomes.append(headers.malformed_headers(template, work / "headers"))
    if "templates" in only:
        outcomes.append(files.template_escapes(template, work / "escapes"))
    if "server" in only:
        outcomes += server.attack_server(_served(work / "served", model), counts, say)
    return outcomes


def _served(folder: Path, model: Path | None) -> Path:
    """A model whose files may be changed: links to the one that was given, or a tiny one."""
    from headstart.calibrate.tiny import write_tiny

    if model is not None:
        folder.mkdir()
        for path in model.iterdir():
            (folder / path.name).symlink_to(path.resolve())
        return folder
    runs = support("server_runs")
    sizes: dict[str, Any] = runs.SIZES
    write_tiny("mimo", folder, rate=0.9, seed=3, dtype="F32", **sizes)
    runs.write_tokenizer(folder, None)
    return folder


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def document(outcomes: list[Outcome], words: list[str], seconds: float) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join(["python", "scripts/attack_check.py", *words]),
        "hardware": f"{os.cpu_count()} cores of {processor_name()}, {platform.system()}",
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "fastapi", "xgrammar")},
        },
        "seconds": round(seconds),
        "attacks": [outcome.document() for outcome in outcomes],
        "broken": sum(len(outcome.broken) for outcome in outcomes),
    }


def merged(path: Path, found: dict[str, Any]) -> dict[str, Any]:
    """With attacks of the same day that this run has left out (--only)."""
    if not path.exists():
        return found
    before: dict[str, Any] = json.loads(path.read_text())
    names = {part["attack"] for part in found["attacks"]}
    attacks = [part for part in before["attacks"] if part["attack"] not in names]
    attacks += found["attacks"]
    return {
        **found, "attacks": attacks, "seconds": before["seconds"] + found["seconds"],
        "command": f"{before['command']}; {found['command']}",
        "broken": sum(len(part["broken"]) for part in attacks),
    }  # fmt: skip


def table(found: dict[str, Any]) -> str:
    lines = [
        f"# Attacks repeated, {found['date']}", "",
        f"`{found['command']}`, {found['seconds']} s on {found['hardware']}; "
        + ", ".join(f"{name} {number}" for name, number in found["versions"].items()) + ".", "",
        "| attack | trials | how they ended | promises broken | others: usual, during it (ms) |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    for part in found["attacks"]:
        ends = ", ".join(f"{end} {number}" for end, number in sorted(part["ends"].items()))
        usual, during = (part.get(f"others: {what}") for what in (
            "usual median ms", "median ms during it"
        ))  # fmt: skip
        waited = f"{usual}, {during}" if usual is not None else ""
        lines.append(
            f"| {part['attack']} | {part['trials']} | {ends} | {len(part['broken'])} | {waited} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="as many as the review had")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--out", type=Path, help="folder for a dated result")
    parser.add_argument("--model", type=Path, help="checkpoint to serve; default: a tiny one")
    asked = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        outcomes = attacked(Path(name), FULL if asked.full else QUICK, asked.only, asked.model)
    words = [*(["--full"] if asked.full else []), *(
        ["--only", *asked.only] if asked.only != list(GROUPS) else []
    ), *(["--model", asked.model.name] if asked.model is not None else [])]  # fmt: skip
    found = document(outcomes, words, time.monotonic() - started)
    print(table(found))
    if asked.out is not None:
        stem = asked.out / f"attack_check_{os.cpu_count()}-cores_{found['date']}"
        kept = merged(stem.with_suffix(".json"), found)
        stem.with_suffix(".json").write_text(json.dumps(kept, indent=2) + "\n")
        stem.with_suffix(".md").write_text(table(kept))
    for outcome in outcomes:
        for broken in outcome.broken:
            print(f"BROKEN {outcome.name}: {broken}")
    return 1 if found["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
