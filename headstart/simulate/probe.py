"""The doctor: which hidden-state contract a head's weights obey, or that the head is dead.

The head drafts one token at every row of a text that the trunk has written on, under each
alternative, and is compared with the trunk's own choice at the next row. RMS norms hide most of a
wrong input: such drafts look fluent, and only their agreement tells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, cast

import torch
from torch import Tensor

from headstart.checkpoint.reader import Checkpoint
from headstart.errors import HeadNotFound
from headstart.families.base import HeadLayout
from headstart.models.build import LoadedModel
from headstart.models.streamed_pangu import StreamedPangu
from headstart.simulate.probed import Loaded, Stored, Subject, continued

PROBE_TEXT = (
    "The harbour wakes before the town does. Boats come in with the tide, and the first crates of "
    "fish are on the quay while the lamps still burn. A boy counts them aloud, his father writes "
    "the numbers down, and nobody speaks of anything else until the last box is weighed. Then the "
    "market opens. People ask what is fresh today, and the answer is always the same: everything. "
    "By noon the ice has melted, the tables are washed, and the gulls have what is left. In the "
    "afternoon the nets are mended, because tomorrow the harbour will wake before the town again."
)
_FIELDS = {
    "trunk_hidden": ("after_final_norm", "before_final_norm"),
    "fuse_order": ("embed_first", "hidden_first"),
}
_UNSETTLED = {"out_norm_mean": ("kept", "subtracted")}  # tried where a layout says so
_RECYCLED = ("after_out_norm", "before_out_norm")
_CONTINUED = 64  # tokens that the trunk adds to a text
_MADE_UP = 32  # tokens to begin with where there is no text
_CLEAR = 3.0  # standard errors that separate two contracts
_ALIVE = 0.1  # agreement above chance of a head that is of any use; stock heads have 0.5 and more
_SAME = 0.01  # mean difference of log-probabilities that is rounding, or a norm's epsilon
_UNIFORM = 0.5  # text on which chance agrees this often tells nothing

Verdict = Literal["registry", "other", "unclear", "dead"]


@dataclass(frozen=True)
class Variant:
    """How well the head does under one contract."""

    contract: dict[str, str]
    agreement: float  # share of rows where it says what the trunk says
    chance: float  # the same if its guesses were dealt to other rows
    logprob: float  # mean log-probability that it gives the trunk's choice
    margin: float  # how far behind the best one, in standard errors of the paired difference
    is_same: bool  # whether it does what the best one does, but for rounding

    @property
    def name(self) -> str:
        said = {"recycled_hidden": "recycled ", "out_norm_mean": "mean before the out norm "}
        parts = (f"{said.get(field, '')}{value}" for field, value in self.contract.items())
        return ", ".join(parts).replace("_", " ")


@dataclass(frozen=True)
class ProbeReport:
    """Alternatives at depth 1, and what is recycled at depth 2; the best one first."""

    num_rows: int
    registry: dict[str, str]
    variants: list[Variant]
    recycled: list[Variant]  # empty where it cannot matter
    verdict: Verdict
    said: str

    def as_json(self) -> dict[str, Any]:
        return {
            "rows": self.num_rows,
            "registry": self.registry,
            "verdict": self.verdict,
            "said": self.said,
            "depth_1": [vars(variant) for variant in self.variants],
            "depth_2": [vars(variant) for variant in self.recycled],
        }


def probe(built: LoadedModel, text: Sequence[int] | None = None) -> ProbeReport:
    """Measure a model's head on token ids, or on made-up ones."""
    if built.head is None:
        raise HeadNotFound(f"{built.checkpoint.folder} has no head to probe. Give one with --head.")
    with torch.inference_mode():
        ids = continued(built.trunk, probe_ids(built, text), _CONTINUED, built.max_len)
        tokens = torch.tensor(ids, device=built.trunk.embed.device)
        return _report(Loaded(built.trunk, built.head), tokens)


def probe_ids(built: LoadedModel, text: Sequence[int] | None) -> list[int]:
    """The text if the model can read it, else made-up tokens, always the same."""
    return ids_to_read(text, built.config.vocab, built.max_len // 2, count=_MADE_UP)


def ids_to_read(text: Sequence[int] | None, vocab: int, longest: int, *, count: int) -> list[int]:
    """At most `longest` tokens of the text, or `count` made-up ones where it says too little."""
    ids = [] if text is None else list(text)[:longest]
    if len(set(ids)) >= 8:
        return ids
    draw = torch.Generator().manual_seed(0)
    size = (min(count, max(1, longest)),)
    return cast(list[int], torch.randint(vocab, size, generator=draw).tolist())


@dataclass(frozen=True)
class _Measured:
    contract: dict[str, str]
    guesses: Tensor  # [R]
    logprobs: Tensor  # [R], of the trunk's choices


def probe_stored(checkpoint: Checkpoint, text: Sequence[int] | None = None) -> ProbeReport:
    """The same for a family that the engine does not run; the trunk writes nothing on."""
    with torch.inference_mode():
        model = StreamedPangu(checkpoint)
        ids = ids_to_read(text, model.vocab_size, model.longest, count=_MADE_UP + _CONTINUED)
        return _report(Stored(model), torch.tensor(ids))


def _report(subject: Subject, tokens: Tensor) -> ProbeReport:
    layout = subject.layout
    tried = _FIELDS | {field: _UNSETTLED[field] for field in layout.unsettled}
    own = {field: str(getattr(layout, field)) for field in tried}
    contracts = [dict(zip(tried, values, strict=True)) for values in product(*tried.values())]
    if layout.trunk_hidden == "before_hc_head":  # its tensors fit no other contract
        contracts = [own]
    choices = subject.choices(tokens)
    variants = _ranked([_measured(subject, tokens, choices, 1, c) for c in contracts], choices[1:])
    best = variants[0].contract
    recycled: list[Variant] = []
    if layout.out_norm == "own" and layout.topology != "parallel":
        alternatives = [{**best, "recycled_hidden": way} for way in _RECYCLED]
        found = [_measured(subject, tokens, choices, 2, c) for c in alternatives]
        recycled = _ranked(found, choices[2:])
    rows = len(tokens) - 1
    verdict, said = _judged(variants, own, rows)
    if verdict in ("registry", "other") and recycled:
        said += _recycled_said(recycled, layout)
    return ProbeReport(rows, own, variants, recycled, verdict, said)


def _measured(
    subject: Subject, ids: Tensor, choices: Tensor, depth: int, contract: dict[str, str]
) -> _Measured:
    logits = subject.drafts(ids, depth, contract)
    known = choices[depth:]  # what the trunk says after reading what the head has read
    logprobs = logits.log_softmax(-1).gather(-1, known.unsqueeze(-1)).squeeze(-1)
    return _Measured(contract, logits.argmax(-1), logprobs)


def _ranked(found: list[_Measured], choices: Tensor) -> list[Variant]:
    """Best first: by agreement, then by log-probability."""
    right = [each.guesses == choices for each in found]
    order = sorted(
        range(len(found)),
        key=lambda i: (-int(right[i].sum()), -float(found[i].logprobs.mean())),
    )
    best = order[0]
    return [
        Variant(
            found[i].contract,
            float(right[i].double().mean()),
            _chance(found[i].guesses, choices),
            float(found[i].logprobs.mean()),
            _margin(right[best], right[i], found[best].logprobs, found[i].logprobs),
            float((found[best].logprobs - found[i].logprobs).abs().mean()) < _SAME,
        )
        for i in order
    ]


def _chance(guesses: Tensor, choices: Tensor) -> float:
    """Expected agreement if the guesses stood at other rows."""
    size = int(torch.maximum(guesses.max(), choices.max())) + 1
    shares = [torch.bincount(x, minlength=size).double() / len(x) for x in (guesses, choices)]
    return float(shares[0] @ shares[1])


def _margin(best: Tensor, other: Tensor, best_logprobs: Tensor, other_logprobs: Tensor) -> float:
    """Standard errors between two contracts on the same rows, by agreement or log-probability."""
    wins, losses = int((best & ~other).sum()), int((other & ~best).sum())
    by_agreement = (wins - losses) / math.sqrt(wins + losses) if wins + losses else 0.0
    gaps = (best_logprobs - other_logprobs).double()
    error = float(gaps.std()) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
    by_logprob = float(gaps.mean()) / error if error > 1e-9 else 0.0
    return max(by_agreement, by_logprob)


def _judged(variants: list[Variant], own: dict[str, str], rows: int) -> tuple[Verdict, str]:
    best = variants[0]
    share = f"{100 * best.agreement:.0f} % of {rows} rows"
    if best.chance > _UNIFORM:
        return "unclear", (
            f"the text repeats itself too much to tell ({100 * best.chance:.0f} % agreement by "
            "chance). Give another one with --probe-text."
        )
    if best.agreement < best.chance + _ALIVE:
        return "dead", (
            f"at best the head agrees with the trunk on {share}, chance gives "
            f"{100 * best.chance:.0f} %. Its weights are fresh, shuffled, of another model, or "
            "trained too little; train it, or restore the original one."
        )
    rivals = [variant for variant in variants[1:] if variant.margin < _CLEAR]
    unlike = [variant for variant in rivals if not variant.is_same]
    same = [variant for variant in variants if variant.is_same]  # the best one is among them
    names = "; ".join(variant.name for variant in unlike)
    if unlike and best.contract != own:
        return "unclear", (
            f"the head agrees on {share} with {best.name}; on this text that cannot be told from "
            f"{names}. Give a longer one with --probe-text."
        )
    if any(variant.contract == own for variant in same):
        others = "; ".join(variant.name for variant in same if variant.contract != own)
        also = f" With these weights {others} is the same." if others else ""
        also += f" On this text {names} does nearly as well." if unlike else ""
        return "registry", f"the head obeys the registry's contract: it agrees on {share}.{also}"
    mine = next(variant for variant in variants if variant.contract == own)
    return "other", (
        f"the weights obey another contract than the registry's: {best.name} agrees on {share}, "
        f"{mine.name} on {100 * mine.agreement:.0f} %."
    )


def _recycled_said(recycled: list[Variant], layout: HeadLayout) -> str:
    best, other = recycled
    way = best.contract["recycled_hidden"]
    if other.is_same or other.margin < _CLEAR:
        return " What is recycled to depth 2 makes no clear difference here."
    same = "as" if way == layout.recycled_hidden else "against what"
    return (
        f" Depth 2 wants {way} recycled, {same} the registry says "
        f"({100 * best.agreement:.0f} against {100 * other.agreement:.0f} %)."
    )
