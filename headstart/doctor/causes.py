"""Likely causes of drafts that are refused, as data: by engine, release, family and checkpoint.

What holds for one family is in its own file (`Family.cautions`); here is what holds for engines and
for checkpoints. Causes are listed in the order in which they are worth checking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from headstart.checkpoint.config import Config
from headstart.checkpoint.provenance import read_provenance
from headstart.checkpoint.reader import Checkpoint
from headstart.doctor.verdict import Verdict
from headstart.errors import ConfigError, some
from headstart.families.engines import ENGINE_TITLES
from headstart.families.versions import parse
from headstart.heads.detection import find_head, quoted
from headstart.heads.inspection import Report
from headstart.launch.checks import former_contract

_READ_BYTES = 1 << 20  # of a matrix at a time, until something in it is not zero
_REFUSED: tuple[Verdict, ...] = ("dead", "low", "below")


@dataclass(frozen=True)
class Case:
    """What is known about a server that is looked at; None: not known."""

    engine: str | None
    version: str | None
    report: Report | None
    verdict: Verdict

    @property
    def model(self) -> str:
        return "MODEL" if self.report is None else quoted(self.report.path)

    @property
    def has_quantized_trunk(self) -> bool:
        return self.report is not None and bool(self.report.trunk.quantization)

    @property
    def has_quantized_head(self) -> bool:
        return self.report is not None and self.report.head.is_quantized


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Something that makes engines refuse drafts; `text` may name {model}."""

    text: str
    seen_in: str = ""  # issues and pull requests, as project#number
    engines: tuple[str, ...] = ()  # empty: whichever it is
    verdicts: tuple[Verdict, ...] = _REFUSED
    concerns: Callable[[Case], bool] = lambda case: True

    def holds(self, case: Case) -> bool:
        is_engine = not self.engines or case.engine in self.engines
        return is_engine and case.verdict in self.verdicts and self.concerns(case)

    def said(self, case: Case) -> str:
        where = f" ({self.seen_in})" if self.seen_in else ""
        return self.text.replace("{model}", case.model) + where


TABLE = (
    Cause(
        text="the server was started without drafting; `headstart launch {model} --engine ENGINE` "
        "writes the flags",
        verdicts=("off",),
    ),
    Cause(
        engines=("vllm",),
        text="releases before pull request 35548 start with uninitialised memory where the "
        "checkpoint has no whole head",
        seen_in="vllm-project/vllm#35548, #35031",
        verdicts=("dead", "low"),
        concerns=lambda case: case.report is None or not case.report.head.is_usable,
    ),
    Cause(
        engines=("vllm",),
        text="the head is stored as it was trained and the trunk is quantised: vLLM builds the "
        "head quantised, too, unless the list of unquantised modules names it (`headstart "
        "inspect {model}`), and its weights then have nowhere to go",
        seen_in="vllm-project/vllm#37667, NVIDIA/Model-Optimizer#2427",
        concerns=lambda case: case.has_quantized_trunk and not case.has_quantized_head,
    ),
    Cause(
        engines=("vllm",),
        text="eh_proj is never quantised in vLLM: one stored in 8 bits is read as if it were not",
        seen_in="vllm-project/vllm#48492, #48506",
        concerns=lambda case: case.has_quantized_head,
    ),
    Cause(
        engines=("sglang",),
        text="a head that is quantised otherwise than the trunk is built as the trunk is, or "
        "without its scales; --speculative-draft-model-quantization says how it is stored",
        seen_in="sgl-project/sglang#35797, mratsim/sglang-qwen38fn-sm120-turbo#3",
        concerns=lambda case: case.has_quantized_trunk or case.has_quantized_head,
    ),
    Cause(
        engines=("llamacpp",),
        text="the file was converted or quantised so that the head in it is no longer what was "
        "trained; `headstart restore {model} --from ORIGINAL --out DIR` puts it back",
        seen_in="ggml-org/llama.cpp#23476, IST-DASLab/GSQ#11",
    ),
    Cause(
        text="the head obeys another contract than it is run with (fusion halves exchanged, a "
        "state before a norm that should come after it), or its weights are not the trained "
        "ones: `headstart inspect {model} --probe` runs it under each contract and tells",
    ),
    Cause(
        text="the head belongs to another fine-tune of the model: `headstart score {model} --data "
        "DATA` shows what it agrees to, `headstart train` tunes it",
        seen_in="vllm-project/speculators#366",
    ),
    Cause(
        engines=("vllm",),
        text="--hf-overrides (longer positions, say) do not reach the head: behind the native "
        "length nothing is accepted",
        seen_in="vllm-project/vllm#58080",
        verdicts=("low", "below", "dead"),
    ),
    Cause(
        engines=("vllm", "sglang"),
        text="pipeline parallel, or separate servers for prefill and decode, lose the head's "
        "states; try one server with tensor parallel",
        seen_in="vllm-project/vllm#49355, #54926, sgl-project/sglang#7927",
    ),
    Cause(
        text="the requests are of another kind than the answers that were scored, or are sampled "
        "at a higher temperature, which lowers acceptance by itself",
        seen_in="tenstorrent/vllm#442, vllm-project/vllm#41044",
        verdicts=("below", "low"),
    ),
)


def likely_causes(case: Case) -> list[str]:
    """What to check, the surest first."""
    found: list[str] = []
    if case.verdict in _REFUSED and case.report is not None:
        found += _of_checkpoint(case.report)
        found += _of_family(case, case.report)
    found += [cause.said(case) for cause in TABLE if cause.holds(case)]
    return list(dict.fromkeys(found))


def _of_checkpoint(report: Report) -> Iterator[str]:
    """What the files themselves show."""
    name, head = quoted(report.path), report.head
    if report.format is None and head.tensors:
        if empty := _empty_matrices(Checkpoint.open(report.path)):
            yield (
                f"{len(empty)} matrices of the head hold nothing but zeros ({some(empty)}): "
                f"`headstart restore {name} --from ORIGINAL --out DIR` puts the trained ones back"
            )
        made = read_provenance(report.path)
        if made.get("fresh") is True and "training" not in made:
            yield "the head is fresh (headstart graft) and was never trained: `headstart train`"
    if not head.is_usable:
        yield (
            f"the head is {head.state} ({len(head.missing)} tensors missing): `headstart restore "
            f"{name} --from ORIGINAL --out DIR`"
        )
    if head.outside:
        yield (
            f"the head lies in {some(head.outside)}, which the index does not list and engines do "
            f"not read: `headstart stitch {name} {name} --out DIR`"
        )
    if report.family is not None and head.root in report.family.keys.unread:
        yield (
            f"names of the head begin with {head.root!r}, which engines pass over: `headstart "
            f"stitch {name} {name} --out DIR`"
        )
    if head.respelled:
        yield (
            f"{len(head.respelled)} tensors of the head are not named as engines ask for them "
            f"({head.respelled[0]}): `headstart stitch {name} {name} --out DIR`"
        )


def _empty_matrices(checkpoint: Checkpoint) -> list[str]:
    """Names of matrices of the head that are all zero; vectors may well be."""
    empty = []
    for name in find_head(checkpoint).tensors.values():
        info = checkpoint.info(name)
        if len(info.shape) < 2 or not info.num_bytes:
            continue
        if _is_zero(info.file, info.start, info.num_bytes):
            empty.append(name)
    return empty


def _is_zero(file: Path, start: int, num_bytes: int) -> bool:
    """Matrices that hold something show it at once, so most of a head is not read."""
    with file.open("rb") as handle:
        handle.seek(start)
        while num_bytes:
            piece = handle.read(min(_READ_BYTES, num_bytes))
            if not piece or piece.count(0) < len(piece):
                return False
            num_bytes -= len(piece)
    return True


def _of_family(case: Case, report: Report) -> Iterator[str]:
    """Faults of this release with this family, as its file lists them."""
    family, engine = report.family, case.engine
    if family is None or engine not in ENGINE_TITLES:
        return
    fields = Config(report.config).fields
    version = case.version if case.version is not None and _is_version(case.version) else None
    for caution in family.cautions:
        if version is None:
            if caution.engine == engine and caution.concerns(fields):
                yield f"{ENGINE_TITLES[engine]}{caution.releases()}: {caution.text}"
        elif caution.holds(engine, version, fields):
            yield f"{ENGINE_TITLES[engine]} {version}: {caution.text}"
    if version is not None:
        yield from former_contract(family, engine, version)


def _is_version(text: str) -> bool:
    try:
        parse(text)
    except ConfigError:
        return False
    return True
