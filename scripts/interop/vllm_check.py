"""Heads that went through our commands, served by the real vLLM on the CPU (method: mtp).

For each family: a tiny checkpoint whose head agrees with its trunk some of the time is served
without and with its head; then the head is exported in every format the family allows and stitched
into the bare trunk, or restored into it, and the result must give the same tokens and the same
draft counters at every depth. Controls, whose counters must differ: fusion halves swapped, decoder
layer silenced. Llama and Qwen2 trunks are grafted into the MiMo layout and served too.

Prints a table, writes JSON with --json, exits 1 on any failure.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path

from checking import check_all
from checkpoints import (
    CommandFailed,
    differences,
    drop_block,
    headstart,
    swap_fusion_halves,
    with_changed_head,
)
from environments import python_of
from vllm_engine import Engine, EngineFailed, Served

from headstart.calibrate.tiny import write_tiny

DEPTHS = (1, 3)
LOWEST, HIGHEST = 0.2, 0.9  # acceptance at depth 1 with which a check can fail
_EVERY_FORMAT = ("headstart", "sglang", "xllm", "speculators")
# family -> stored dtype (vLLM's CPU kernel for gated delta nets takes BF16 only), formats
FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "mimo": ("F32", _EVERY_FORMAT),
    "glm4_moe": ("F32", _EVERY_FORMAT),
    "deepseek_v3": ("F32", _EVERY_FORMAT),
    "ernie4_5_moe": ("F32", ("headstart", "sglang")),
    "qwen3_5_text": ("BF16", _EVERY_FORMAT),
    "qwen3_next": ("BF16", ("headstart", "sglang", "speculators")),
}
GRAFTS = ("llama", "qwen2")
_SHARD_BYTES = 3_000_000


@dataclass
class Row:
    """One checkpoint served at one depth."""

    checkpoint: str
    depth: int
    drafts: int
    accepted: tuple[int, ...]
    rates: list[float]
    same_tokens: bool  # as the original without speculation


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


class Serving:
    """One engine on behalf of one family; every run becomes a row of the result."""

    def __init__(self, engine: Engine, result: Result):
        self._engine, self._result = engine, result
        self._plain: list[list[int]] = []

    def plain(self, model: Path) -> None:
        """The tokens without speculation, with which all others are compared."""
        self._plain = self._engine.serve(model, 0, self._result.dtype).tokens

    def serve(self, name: str, model: Path, depth: int) -> Served:
        """Whatever the head drafts, the tokens are those without speculation."""
        served = self._engine.serve(model, depth, self._result.dtype)
        same = served.tokens == self._plain
        row = Row(name, depth, served.drafts, served.accepted, served.rates, same)
        self._result.rows.append(row)
        mark = "same tokens" if same else "OTHER TOKENS"
        print(
            f"{self._result.family:13} {name:24} K={depth}  drafts {served.drafts:4}  accepted "
            f"{list(served.accepted)!s:16} {served.rates!s:24} {mark}",
            flush=True,
        )
        self._result.expect(same, f"{name}, K={depth}: tokens differ from no speculation")
        return served


def check_family(variant: str, python: Path, work: Path, versions: dict[str, str]) -> Result:
    dtype, formats = FAMILIES[variant]
    result = Result(variant, dtype)
    original = write_tiny(variant, work / "original", dtype=dtype)
    trunk = write_tiny(
        variant, work / "trunk", dtype=dtype, with_head=False, shard_bytes=_SHARD_BYTES
    )
    returned = {f"{name}, stitched": round_trip(original, trunk, name, work) for name in formats}
    returned["restored"] = work / "restored"
    headstart("restore", trunk, "--from", original, "--out", work / "restored")
    controls = {
        "control: halves swapped": swap_fusion_halves,
        "control: block silenced": drop_block,
    }
    with Engine(python, work / "vllm.log", work) as engine:
        versions.update(engine.versions)
        serving = Serving(engine, result)
        serving.plain(original)
        before = {depth: serving.serve("original", original, depth) for depth in DEPTHS}
        for depth, served in before.items():
            expect_lively(result, "original", depth, served)
        for name, model in returned.items():
            changed = differences(original, model)
            result.expect(not changed, f"{name}: tensors changed: {', '.join(changed[:3])}")
            for depth in DEPTHS:
                served = serving.serve(name, model, depth)
                result.expect(
                    served.counters == before[depth].counters,
                    f"{name}, K={depth}: counters {served.counters}, "
                    f"before {before[depth].counters}",
                )
        for name, change in controls.items():
            model = with_changed_head(original, work / change.__name__, change)
            served = serving.serve(name, model, DEPTHS[-1])
            result.expect(
                served.counters != before[DEPTHS[-1]].counters, f"{name}: the counters did not move"
            )
    return result


def round_trip(original: Path, trunk: Path, format_name: str, work: Path) -> Path:
    """The head of `original` out into a format and back into the bare trunk."""
    head, back = work / f"head-{format_name}", work / f"stitched-{format_name}"
    headstart("export", original, "--format", format_name, "--out", head)
    headstart("stitch", head, trunk, "--out", back)
    return back


def expect_lively(result: Result, name: str, depth: int, served: Served) -> None:
    """Accepted, recovered and bonus tokens all occurred, at a rate that leaves room to fail."""
    label = f"{name}, K={depth}"
    result.expect(len(served.accepted) == depth, f"{label}: {len(served.accepted)} depths counted")
    rate = served.accepted[0] / served.drafts
    result.expect(LOWEST <= rate <= HIGHEST, f"{label}: acceptance {rate:.2f} at depth 1")
    result.expect(0 < served.accepted[-1] < served.drafts, f"{label}: no bonus or no recovery")


def check_graft(variant: str, python: Path, work: Path, versions: dict[str, str]) -> Result:
    """A grafted trunk keeps its text; with a head made for that trunk it drafts."""
    result = Result(f"{variant} graft", "F32")
    trunk = write_tiny(variant, work / "trunk", dtype="F32")
    donor = write_tiny("mimo", work / "mimo", dtype="F32")
    headstart("graft", trunk, "--out", work / "grafted")
    headstart("stitch", donor, work / "grafted", "--out", work / "stitched")
    with Engine(python, work / "vllm.log", work) as engine:
        versions.update(engine.versions)
        serving = Serving(engine, result)
        serving.plain(trunk)
        for depth in DEPTHS:
            serving.serve("grafted, untrained", work / "grafted", depth)
            served = serving.serve("grafted, MiMo's head", work / "stitched", depth)
            expect_lively(result, "grafted, MiMo's head", depth, served)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--envs", type=Path, default=Path(".interop"))
    parser.add_argument("--work", type=Path, default=Path(".interop/work"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", choices=(*FAMILIES, *GRAFTS), default=[])
    options = parser.parse_args()
    python = python_of(options.envs, "vllm")

    def check(variant: str, work: Path, versions: dict[str, str]) -> Result:
        kind = check_family if variant in FAMILIES else check_graft
        return kind(variant, python, work, versions)

    return check_all(
        options.only or (*FAMILIES, *GRAFTS),
        check,
        lambda variant, error: Result(variant, "", failures=[error]),
        errors=(CommandFailed, EngineFailed),
        folder=lambda variant: options.work / variant,
        out=options.json,
    )


if __name__ == "__main__":
    sys.exit(main())
