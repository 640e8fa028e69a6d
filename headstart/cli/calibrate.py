"""`headstart calibrate --shape S --acceptance R --out DIR`: a model of known acceptance.

With `--tokenizer FOLDER` it writes text of that tokenizer, so that grammars and tools can be tried.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headstart.cli.options import DryRun, Json, Out, Overwrite
from headstart.report.terminal import say

if TYPE_CHECKING:
    from headstart.calibrate.calibrated import StoredAs
    from headstart.calibrate.given_tokenizer import GivenTokenizer


def run(
    *,
    shape: Annotated[str, typer.Option("--shape", help="A model's name, or numbers.")],
    acceptance: Annotated[
        float, typer.Option("--acceptance", help="Rate at which a draft is right, at every depth.")
    ],
    out: Out = None,
    active: Annotated[
        int | None, typer.Option("--active", help="Tokens in use; default: all but two.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            help="Folder with a tokenizer.json, or demo; its ordinary tokens are those in use.",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="BF16, F16 or F32.")] = "BF16",
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights",
            help="A quantised format: fp8-block, fp8-row, fp8-tensor, int8-row, awq, gptq, "
            "auto-round, compressed-tensors, nvfp4 or mxfp4.",
        ),
    ] = None,
    copy_length: Annotated[
        int | None,
        typer.Option(
            "--copy-length", help="Also write prompts that it repeats spans of so many tokens from."
        ),
    ] = None,
    copy_share: Annotated[
        float, typer.Option("--copy-share", help="Of each answer, that stands in its prompt.")
    ] = 0.5,
    copy_prompts: Annotated[int, typer.Option("--copy-prompts", help="How many of them.")] = 64,
    copy_tokens: Annotated[
        int, typer.Option("--copy-tokens", help="Tokens of an answer to one of them.")
    ] = 512,
    seed: Annotated[int, typer.Option("--seed", help="Which of many such checkpoints.")] = 0,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json_output: Json = False,
) -> None:
    from headstart.calibrate.calibrated import write_calibrated
    from headstart.calibrate.copy_prompts import FILE_NAME, CopyPlan
    from headstart.calibrate.given_tokenizer import ANY_TEXT
    from headstart.checkpoint.atomic import check_target
    from headstart.cli.progress import byte_progress
    from headstart.errors import ConfigError

    if dtype not in ("BF16", "F16", "F32"):
        raise ConfigError(f"--dtype is {dtype!r}; expected BF16, F16 or F32.")
    if out is None and not dry_run:
        raise ConfigError("no --out given; say where the result goes, or add --dry-run.")
    if out is not None and not dry_run:  # it would be refused after minutes of computing
        check_target(out, overwrite=overwrite)
    copies = None
    if copy_length is not None:
        copies = CopyPlan(
            length=copy_length, share=copy_share, prompts=copy_prompts, answer_tokens=copy_tokens
        )
    with byte_progress("calibrate", 0) as report:
        made = write_calibrated(
            shape, acceptance, None if dry_run else out, active=active, seed=seed, dtype=dtype,
            tokenizer=None if tokenizer is None else _tokenizer(tokenizer), overwrite=overwrite,
            stored_as=None if weights is None else _stored_as(weights), copies=copies,
            report=report,
        )  # fmt: skip
    if json_output:
        done = {"out": None if out is None else str(out), "dry_run": dry_run}
        say(json.dumps({**made, **done}))
        return
    say(
        f"{made['tensors']} tensors, {made['parameters']} parameters, "
        f"{_size(made['bytes'])}, {made['active']} tokens in use, acceptance "
        f"{acceptance} at every depth, decisions {made['margin']:.2f} apart over "
        f"{made['margin_tokens']} tokens tried"
    )
    if tokenizer is None:
        say(f"its words are t2 to t{made['vocab'] - 1}; any other word is read as token 0")
    else:
        say(
            f"{len(made['tokenizer']['left_out'])} of {made['tokenizer']['ids']} ids of the "
            "tokenizer are never written (special tokens, parts of characters); the regex "
            f"{ANY_TEXT} permits all the others"
        )
    if copies is not None:
        say(
            f"{FILE_NAME}: {copies.prompts} prompts; {copies.share:.0%} of an answer of "
            f"{copies.answer_tokens} tokens stands in its prompt, in spans of {copies.length}"
        )
    if dry_run:
        say("dry run: nothing was written", file=sys.stderr)
    else:
        say(f"wrote {out}")


def _stored_as(weights: str) -> StoredAs:
    from headstart.heads.quantized_copy import copy_in, format_named

    form = format_named(weights)  # before anything is computed
    return lambda config, tensors: copy_in(form, config, tensors)


def _tokenizer(name: str) -> GivenTokenizer:
    if name == "demo":
        from headstart.demo.llama import demo_tokenizer

        return demo_tokenizer()
    from headstart.calibrate.given_tokenizer import read_tokenizer

    return read_tokenizer(Path(name))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.2f} MB"
