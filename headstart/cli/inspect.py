"""`headstart inspect MODEL`: is there a head, which family, is it whole, how to serve with it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headstart.cli.options import Json, Model, ModelType, head_option
from headstart.errors import ConfigError, DataError
from headstart.files import read_text, why_unreadable
from headstart.report.terminal import say

if TYPE_CHECKING:
    from headstart.checkpoint.reader import Checkpoint
    from headstart.simulate.probe import ProbeReport


def run(
    *,
    model: Model,
    json_output: Json = False,
    model_type: ModelType = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Run the head: which contract do its weights obey?")
    ] = False,
    probe_text: Annotated[
        Path | None, typer.Option("--probe-text", metavar="FILE", help="Text to probe with.")
    ] = None,
    head: Annotated[Path | None, head_option("A head to probe, not the model's own.")] = None,
    device: Annotated[str, typer.Option("--device", help="To probe on: cpu, cuda, auto.")] = "auto",
    dtype: Annotated[
        str, typer.Option("--dtype", help="To probe in: float32, bfloat16, float64, auto.")
    ] = "auto",
) -> None:
    from headstart.checkpoint.hub import local_folder
    from headstart.cli.inspect_view import show, show_standalone
    from headstart.heads.formats import open_any
    from headstart.heads.inspection import inspect, inspect_standalone
    from headstart.heads.predicted import with_predicted
    from headstart.launch import commands_for
    from headstart.launch.our_server import own_command

    if not probe and (probe_text is not None or head is not None):
        raise ConfigError("--probe-text and --head belong to --probe; add it.")
    checkpoint = open_any(local_folder(model))
    standalone = inspect_standalone(checkpoint)
    if standalone is not None:  # served with its model, so there are no commands to show
        if probe:
            raise ConfigError(
                f"{model} holds a head alone; probe its model, with --head "
                f"{shlex.quote(str(model))}."
            )
        if json_output:
            say(json.dumps(standalone.as_json(), indent=2))
        else:
            show_standalone(standalone)
        return
    report = with_predicted(inspect(checkpoint, model_type))
    engines = {"headstart": own_command(report), **commands_for(report)}
    is_apart = report.family is not None and report.family.is_probed_apart
    if is_apart and head is not None:
        raise ConfigError(f"--head is {head}; {model} can only be probed with its own head.")
    found = _probed(checkpoint, head, probe_text, device, dtype, is_apart) if probe else None
    if not json_output:
        show(report, engines, found)
        return
    document = report.as_json()
    document["engines"] = {
        name: {"command": None, "reason": answer, "warnings": []}
        if isinstance(answer, str)
        else {"command": answer.shell(), "reason": None, "warnings": list(answer.warnings)}
        for name, answer in engines.items()
    }
    if found is not None:
        document["probe"] = found.as_json()
    say(json.dumps(document, indent=2))


def _probed(
    checkpoint: Checkpoint,
    head: Path | None,
    file: Path | None,
    device: str,
    dtype: str,
    is_apart: bool,
) -> ProbeReport:
    from headstart.data.prompt_reader import PromptReader
    from headstart.heads.formats import published
    from headstart.models.build import build
    from headstart.simulate.probe import PROBE_TEXT, probe, probe_stored

    try:
        text = PROBE_TEXT if file is None else read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{file} cannot be read ({why_unreadable(error)}). Give a text file in UTF-8."
        ) from error
    checkpoint = checkpoint if is_apart else published(checkpoint)
    prompts = PromptReader(checkpoint)
    ids = None if prompts.tokenizer is None else prompts.read(text)
    if file is not None and len(set(ids or ())) < 8:
        raise DataError(
            f"{file} gives {len(ids or ())} tokens, fewer than 8 of them different; give a "
            "paragraph of text that the model's tokenizer knows."
        )
    if is_apart:  # on the CPU in float32, layer by layer
        return probe_stored(checkpoint, ids)
    return probe(build(checkpoint, head, device=device, dtype=dtype), ids)
