"""Options that commands share, and dataclasses turned into flags.

A component's options live in its own frozen dataclass, with help in the fields' metadata. A
command takes that dataclass as one parameter; `flattened` gives the command line one flag per
field, so that a name, a default and a help text exist once.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Checkpoint folder, or a Hugging Face name.", show_default=False
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Where the result goes.", show_default=False),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace a result that Headstart wrote earlier.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, write nothing.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
ModelType = Annotated[
    str | None,
    typer.Option("--model-type", help="Override the detected family.", show_default=False),
]
Dequantize = Annotated[
    bool, typer.Option("--dequantize", help="Turn the head's FP8 and INT8 weights into BF16.")
]
Link = Annotated[
    bool, typer.Option("--link", help="Hard-link unchanged shards instead of copying them.")
]


Device = Annotated[str, typer.Option("--device", help="cpu, cuda or auto.")]
Dtype = Annotated[
    str, typer.Option("--dtype", help="float32, bfloat16, float64, or auto by device.")
]
Head = Annotated[
    Path | None,
    typer.Option("--head", "--draft-model", help="A head to use instead of the model's own."),
]
TimedWeights = Annotated[
    Literal["as-dtype", "int8", "fp8"],
    typer.Option(
        "--weights",
        help="How the engine whose rounds are timed holds them: int8 on a CPU, fp8 on a GPU.",
    ),
]
Bandwidth = Annotated[
    float | None,
    typer.Option("--bandwidth", help="GB/s: costs from sizes instead of measuring them."),
]


def flattened(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with every dataclass parameter replaced by one parameter per field."""
    hints = get_type_hints(function, include_extras=True)
    signature = inspect.signature(function)
    groups: dict[str, type] = {}
    parameters = []
    for name, parameter in signature.parameters.items():
        hint = hints.get(name, parameter.annotation)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            groups[name] = hint
            parameters.extend(_flags(hint))
        else:
            parameters.append(parameter.replace(annotation=hint, kind=parameter.KEYWORD_ONLY))

    @wraps(function)
    def call(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**_taken(group, values))
        code = function(**values)
        if code:
            raise typer.Exit(code)

    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    return call


def _taken(group: type, values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass, taken out of the values of a command line."""
    own = {}
    for field in dataclasses.fields(group):
        value = values.pop(field.name)
        parser = field.metadata.get("parser")
        own[field.name] = parser(value) if parser is not None else value
    return own


def _flags(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group)
    result = []
    for field in dataclasses.fields(group):
        flag = f"--{field.name.replace('_', '-')}"
        # What is on, or may be, must have a way to be off.
        if field.default is True or hints[field.name] == (bool | None):
            flag = f"{flag}/--no{flag[1:]}"
        option = typer.Option(
            flag,
            help=field.metadata.get("help", ""),
            show_default=field.default not in (None, "", False),
        )
        default = (
            field.default_factory()
            if field.default_factory is not dataclasses.MISSING
            else field.default
        )
        hint = hints[field.name]
        if "parser" in field.metadata:  # a type that the command line cannot tell by itself
            hint, default = str, str(default)
        result.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[hint, option],
            )
        )
    return result
