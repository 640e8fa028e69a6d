"""Options that commands share: each with its name and help text in one place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

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
    bool, typer.Option("--dequantize", help="Turn the head's quantised weights into BF16.")
]
Link = Annotated[
    bool, typer.Option("--link", help="Hard-link unchanged shards instead of copying them.")
]
Trunk = Annotated[
    str | None,
    typer.Option(
        "--trunk",
        metavar="FILE.gguf",
        help="With gguf: the trunk whose keys and embedding a head in a file of its own takes.",
        show_default=False,
    ),
]
HeadType = Annotated[
    str | None,
    typer.Option(
        "--head-type",
        help="With gguf: type of the head's matrices: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, "
        "q4_0, ..., q4_k, q5_k, q6_k with llama-quantize on the path; with mlx: q2 to q8; default: "
        "as stored.",
        show_default=False,
    ),
]
DraftVocab = Annotated[
    str | None,
    typer.Option(
        "--draft-vocab",
        metavar="FILE",
        help="The tokens that the head may propose (`headstart vocab`): vllm, gguf (experimental).",
        show_default=False,
    ),
]
MlxLayout = Annotated[
    str | None,
    typer.Option(
        "--mlx-layout",
        help="In a model of MLX: sidecar, vllm-mlx or embedded; default: sidecar.",
        show_default=False,
    ),
]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda or auto.")]
Dtype = Annotated[
    str, typer.Option("--dtype", help="float32, bfloat16, float64, or auto by device.")
]


@dataclass(frozen=True)
class Writing:
    """Where a command that writes a folder puts it, and how it speaks of that."""

    out: Out = None
    overwrite: Overwrite = False
    dry_run: DryRun = False
    json_output: Json = False


def _folder(head: Path | None) -> Path | None:
    """A head may be given by name, as a model may."""
    from headstart.checkpoint.hub import local_folder

    return None if head is None else local_folder(head)


def head_option(help_text: str) -> Any:
    """The flag for a head, in the words of one command."""
    return typer.Option("--head", "--draft-model", help=help_text, callback=_folder)


Head = Annotated[Path | None, head_option("A head to use instead of the model's own.")]
OwnTokens = Annotated[
    int,
    typer.Option(
        "--draft-vocab-own",
        help="Tokens of its text that a request drafts beside a draft vocabulary; 0 for none.",
    ),
]
TimedWeights = Annotated[
    Literal["as-dtype", "int8", "int4", "fp8"],
    typer.Option(
        "--weights",
        help="How the engine whose rounds are timed holds them: int8, int4 (CPU) or fp8 (GPU).",
    ),
]
Bandwidth = Annotated[
    float | None,
    typer.Option("--bandwidth", help="GB/s: costs from sizes instead of measuring them."),
]
