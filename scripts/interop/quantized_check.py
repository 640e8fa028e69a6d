"""Heads in quantised models, in the real vLLM on the CPU and in our engine.

For each format a tiny checkpoint is quantised, loses its head, and gets it back by `headstart
restore`: a BF16 head in a quantised trunk. Both engines run it with drafts. vLLM has to load it,
and its drafts have to be accepted as often as ours; the same checkpoint with a config that calls
the head quantised has to count otherwise, or not to load. Another one has a head whose layer adds
nothing (in 8-bit floats where the format stores heads so), and `headstart stitch` puts a whole one
in its place; the checkpoint before that has to count otherwise, in both engines. `--heads` are
quantised heads of the demo's model (`headstart quantize demo`), stitched into its plain trunk.

A format that vLLM's CPU build does not run is told with its error, and is no failure. Prints a
table, writes JSON with --json, exits 1 on any failure.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checking import check_all
from checkpoints import CommandFailed, drop_block, head_names, headstart, with_changed_head
from engine_check import DEMO, apart, ours, questions
from environments import python_of
from vllm_engine import Engine as Vllm
from vllm_engine import EngineFailed

from headstart import demo
from headstart.calibrate.folder import write_made
from headstart.calibrate.tiny import write_tiny
from headstart.checkpoint.quantized.writing import FORMATS
from headstart.checkpoint.reader import Checkpoint
from headstart.errors import HeadstartError
from headstart.heads.quantized_copy import quantized_copy

DEPTH = 3
WAYS = ("restore", "stitch")
# vLLM's CPU build takes FP32 activations with these alone; the others run in BF16.
WIDE = ("int8-row", "fp8-row", "fp8-tensor")
LOOKED_UP = ("gptq",)  # vLLM looks into the files for what is quantised, too
APART = 0.12  # of acceptance at depth 1 in BF16, where a rounded sum may choose another token
OTHERWISE = 20  # so many drafts or acceptances more or fewer are another head's
SIZES: dict[str, Any] = {"head_dim": 32, "hidden_size": 128, "intermediate_size": 256}


@dataclass
class Result:
    name: str  # a format and what was done with it, or a head of the demo's model
    dtype: str
    ours: tuple[int, ...] = ()  # drafts, then accepted at depth 1, 2, ..., cumulative
    vllm: tuple[int, ...] = ()
    same_tokens: str = ""  # prompts whose tokens are the same in both, of all
    control: str = ""
    before: tuple[int, ...] = ()  # ours, of the head that `stitch` took the place of
    not_run: str = ""  # vLLM's error
    failures: list[str] = field(default_factory=list)
    seconds: int = 0

    def expect(self, is_true: bool, claim: str) -> None:
        if not is_true:
            self.failures.append(claim)
            print(f"FAILED {self.name}: {claim}", flush=True)


def quantized(plain: Path, form: str, out: Path, *, with_head: bool) -> Path:
    """A plain checkpoint in a format."""
    model = Checkpoint.open(plain)
    left_out = set() if with_head else set(head_names(plain).values())
    sources = {name: model.source(name) for name in model.tensors if name not in left_out}
    write_made(*quantized_copy(model.config.raw, sources, form), out, facts={})
    for file in plain.iterdir():
        if not (out / file.name).exists() and file.suffix != ".safetensors":
            shutil.copy(file, out)
    return out


def restored(form: str, work: Path) -> tuple[Path, Callable[[], Path]]:
    """A quantised checkpoint that lost its head and got it back; and the control."""
    plain = write_tiny("mimo", work / "plain", dtype="BF16", **SIZES)
    lost = quantized(plain, form, work / "lost", with_head=False)
    headstart("restore", lost, "--from", plain, "--out", work / "restored")
    return work / "restored", lambda: mistaken(work / "restored", work / "mistaken")


def stitched(form: str, work: Path) -> tuple[Path, Callable[[], Path]]:
    """A quantised checkpoint that got another head; and the same before it did, the control."""
    plain = write_tiny("mimo", work / "plain", dtype="BF16", **SIZES)
    silent = with_changed_head(plain, work / "silent", drop_block)
    before = quantized(silent, form, work / "before", with_head=True)
    headstart("export", plain, "--out", work / "head")
    headstart("stitch", work / "head", before, "--out", work / "stitched")
    return work / "stitched", lambda: before


def mistaken(model: Path, out: Path) -> Path:
    """The control: nothing says that the head is not quantised."""
    shutil.copytree(model, out)
    config = json.loads((out / "config.json").read_text())
    quantization = config["quantization_config"]
    for field_name in ("ignore", "modules_to_not_convert"):
        if field_name in quantization:
            quantization[field_name] = ["lm_head"]
    for field_name in ("dynamic", "extra_config"):
        if field_name in quantization:
            quantization[field_name] = {}
    (out / "config.json").write_text(json.dumps(config))
    return out


def check(
    name: str, heads: dict[str, Path], python: Path, work: Path, versions: dict[str, str]
) -> Result:
    if name in heads:
        head = heads[name]
        result = Result(name, "BF16" if _has_four_bits(head) else "F32")
        headstart("stitch", head, demo.folder(), "--out", work / "stitched")
        model, control, prompts = work / "stitched", None, questions(work / "stitched")
    else:
        way, _, form = name.partition(" ")
        result, prompts = Result(name, "F32" if form in WIDE else "BF16"), None
        model, control = (restored if way == "restore" else stitched)(form, work)
    own = ours(model, DEPTH, prompts)
    result.ours = own.counters
    result.expect(0.15 <= own.rates[0] <= 0.95, f"ours: acceptance {own.rates[0]} at depth 1")
    if name.startswith("stitch ") and control is not None:
        result.before = ours(control(), DEPTH).counters
        result.expect(apart(result.before, result.ours) > OTHERWISE, "ours: as before the stitch")
    with Vllm(python, work / "vllm.log", work) as vllm:
        versions.update(vllm.versions)
        try:
            theirs = vllm.serve(model, DEPTH, result.dtype, prompts)
        except EngineFailed as error:
            result.not_run = str(error)
            print(f"{name:26} {result.ours} not run by vLLM: {error}", flush=True)
            return result
        result.vllm = theirs.counters
        pairs = list(zip(own.tokens, theirs.tokens, strict=True))
        result.same_tokens = f"{sum(one == other for one, other in pairs)} of {len(pairs)}"
        result.expect(
            abs(theirs.rates[0] - own.rates[0]) <= APART,
            f"acceptance at depth 1 is {own.rates[0]} in ours, {theirs.rates[0]} in vLLM",
        )
        if control is not None:
            result.control = _control(control(), vllm, result)
    print(f"{name:26} {result.ours} {result.vllm} same tokens {result.same_tokens}", flush=True)
    return result


def _has_four_bits(head: Path) -> bool:
    return Checkpoint.open(head).config.quantization.get("format") == "pack-quantized"


def _control(model: Path, vllm: Vllm, result: Result) -> str:
    try:
        found = vllm.serve(model, DEPTH, result.dtype)
    except EngineFailed as error:
        return f"does not load: {str(error)[:120]}"
    is_other = apart(found.counters, result.vllm) > OTHERWISE
    is_same = result.name in [f"restore {form}" for form in LOOKED_UP]
    result.expect(is_other or is_same, "the control counts the same")
    return f"{found.accepted[0]} of {found.drafts} accepted"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--envs", type=Path, default=Path(".interop"))
    parser.add_argument("--work", type=Path, default=Path(".interop/work"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--heads", nargs="*", type=Path, default=[], help="of the demo's model")
    parser.add_argument("--only", nargs="*", choices=FORMATS, default=None)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    python = python_of(options.envs, "vllm")
    heads = {f"{DEMO} {folder.name}": folder.resolve() for folder in options.heads}
    forms = FORMATS if options.only is None else options.only
    names = [*(f"{way} {form}" for way in options.ways for form in forms), *heads]

    def one(name: str, work: Path, versions: dict[str, str]) -> Result:
        return check(name, heads, python, work, versions)

    return check_all(
        names, one, lambda name, error: Result(name, "", failures=[error]),
        errors=(EngineFailed, HeadstartError, CommandFailed),
        folder=lambda name: options.work / f"quantized-{name.replace(' ', '-')}", out=options.json,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
