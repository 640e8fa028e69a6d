"""Heads in the speculators format: ours in their tools, theirs in ours.

Ours: what `headstart export --format speculators` writes equals what their converter writes, loads
in their loader, and their `stitch-mtp` puts it back into a checkpoint bit for bit. Theirs: the
output of `speculators convert`, with the all-NaN verifier_lm_head.weight that it adds, goes through
our `convert` and `stitch` and gives back the original. Prints a table, writes JSON with --json,
exits 1 on any failure.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from checkpoints import (
    CommandFailed,
    command,
    differences,
    headstart,
    tensors_of,
    with_changed_head,
)
from environments import python_of

from headstart.calibrate.tiny import write_tiny

FAMILIES = ("qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_LOADER = Path(__file__).with_name("speculators_loader.py")
_ADDED_BY_THEM = "verifier_lm_head.weight"
_SHARD_BYTES = 3_000_000


class Checks:
    """Claims about one family: name -> "" where it holds, else what was found."""

    def __init__(self, family: str):
        self.family = family
        self.found: dict[str, str] = {}

    def record(self, claim: str, problem: object = "") -> None:
        self.found[claim] = str(problem) if problem else ""
        print(
            f"{self.family:18} {claim:58} {'FAILED: ' + str(problem) if problem else 'ok'}",
            flush=True,
        )

    def equal(self, claim: str, one: Path, other: Path) -> None:
        changed = differences(one, other)
        self.record(claim, changed and f"{len(changed)} tensors, e.g. {', '.join(changed[:3])}")


def check_family(variant: str, python: Path, work: Path, versions: dict[str, str]) -> Checks:
    checks = Checks(variant)
    cli = python.with_name("speculators")
    original = write_tiny(variant, work / "original")
    trunk = write_tiny(variant, work / "trunk", with_head=False)
    ours, theirs = work / "ours", work / "theirs"
    headstart("export", original, "--format", "speculators", "--out", ours)
    command(
        cli, "convert", original, "--algorithm", "mtp", "--verifier", original,
        "--output-path", theirs, "--validate-device", "cpu",
    )  # fmt: skip
    _compare_exports(checks, ours, theirs)
    _load_with_theirs(checks, python, ours, versions)
    _stitch_with_theirs(checks, cli, ours, original, trunk, work)
    _take_theirs(checks, theirs, original, trunk, work)
    return checks


def _compare_exports(checks: Checks, ours: Path, theirs: Path) -> None:
    added = tensors_of(theirs).keys() - tensors_of(ours).keys()
    checks.record("their convert adds nothing but its unused LM head", added - {_ADDED_BY_THEM})
    changed = set(differences(ours, theirs)) - {_ADDED_BY_THEM}
    checks.record("our export equals their convert", changed)


def _load_with_theirs(checks: Checks, python: Path, ours: Path, versions: dict[str, str]) -> None:
    answer = json.loads(command(python, _LOADER, ours).splitlines()[-1])
    versions.update(answer["versions"])
    problem = answer["different"] or answer["not_finite"] or ("" if answer["loaded"] else "nothing")
    checks.record("their loader takes our export, every tensor equal", problem)


def _stitch_with_theirs(
    checks: Checks, cli: Path, ours: Path, original: Path, trunk: Path, work: Path
) -> None:
    # With an index their stitch only replaces tensors, without one it also adds them.
    sharded = write_tiny(checks.family, work / "sharded", shard_bytes=_SHARD_BYTES)
    other = with_changed_head(sharded, work / "other", lambda name, value: -value)
    command(cli, "stitch-mtp", ours, other, "--output-path", work / "their-stitch")
    checks.equal("their stitch of ours over another head", original, work / "their-stitch")
    command(cli, "stitch-mtp", ours, trunk, "--output-path", work / "their-addition")
    checks.equal("their stitch of ours into the bare trunk", original, work / "their-addition")


def _take_theirs(checks: Checks, theirs: Path, original: Path, trunk: Path, work: Path) -> None:
    unused = tensors_of(theirs).get(_ADDED_BY_THEM)
    has_nan = unused is not None and bool(torch.isnan(unused).all())
    checks.record("their convert left its NaN tensor (so the checks below can fail)", not has_nan)
    other = work / "other"
    headstart("stitch", theirs, other, "--out", work / "our-stitch")
    checks.equal("our stitch of theirs over another head", original, work / "our-stitch")
    headstart("stitch", theirs, trunk, "--out", work / "our-addition")
    checks.equal("our stitch of theirs into the bare trunk", original, work / "our-addition")
    headstart("convert", theirs, "--to", "headstart", "--out", work / "converted")
    headstart("stitch", work / "converted", other, "--out", work / "our-stitch-2")
    checks.equal("our convert of theirs, then our stitch", original, work / "our-stitch-2")
    headstart("convert", work / "converted", "--to", "speculators", "--out", work / "back")
    changed = set(differences(theirs, work / "back")) - {_ADDED_BY_THEM}
    checks.record("our convert of theirs and back", changed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--envs", type=Path, default=Path(".interop"))
    parser.add_argument("--work", type=Path, default=Path(".interop/work"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", choices=FAMILIES, default=[])
    options = parser.parse_args()
    python = python_of(options.envs, "spec")
    results: dict[str, dict[str, str]] = {}
    versions: dict[str, str] = {}
    for variant in options.only or FAMILIES:
        work = (options.work / f"speculators-{variant}").resolve()
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        try:
            results[variant] = check_family(variant, python, work, versions).found
        except CommandFailed as error:
            results[variant] = {"commands succeed": str(error)}
            print(f"FAILED {variant}: {error}", flush=True)
    if options.json:
        document = {"versions": versions, "results": results}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    failures = sum(bool(problem) for found in results.values() for problem in found.values())
    print(f"{len(results)} checked, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
