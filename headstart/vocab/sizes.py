"""How large a draft vocabulary should be: candidates, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headstart.errors import ConfigError

USUAL_SIZES = (8_000, 16_000, 32_000, 64_000)
# Where no speed could be predicted: what lies outside costs about this share of the drafts.
ENOUGH_COVERAGE = 0.99


@dataclass(frozen=True, kw_only=True)
class SizeResult:
    """What one size gives. None: not measured."""

    size: int
    coverage: float | None = None
    acceptance_length: float | None = None
    drafts: int | None = None  # the K that both are of, the fastest one
    predicted_speed: float | None = None  # of the whole decoding, relative to no drafts at all


def parse_sizes(size: int | None, sizes: str | None) -> tuple[int, ...]:
    """The sizes that --size or --sizes asks for; empty where neither is given."""
    if size is not None and sizes is not None:
        raise ConfigError("give --size or --sizes, not both.")
    words = [] if sizes is None else sizes.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise ConfigError(f"--sizes is {sizes!r}; expected numbers such as 8000,16000,32000.")
    found = (size,) if size is not None else tuple(dict.fromkeys(int(word) for word in words))
    if any(number < 1 for number in found):
        raise ConfigError(f"a size is {min(found)}; give at least 1.")
    return found


def candidate_sizes(vocab_size: int, num_forced: int) -> tuple[int, ...]:
    """Sizes worth trying for a model: the usual ones, or halvings of a small vocabulary."""
    usual = tuple(s for s in USUAL_SIZES if num_forced <= s <= vocab_size // 2)
    halvings = (vocab_size // 8, vocab_size // 4, vocab_size // 2)
    found = usual or tuple(s for s in halvings if s >= max(1, num_forced))
    if not found:
        raise ConfigError(
            f"{num_forced} of the {vocab_size} tokens must be in every draft vocabulary, more than "
            f"half: a reduced one hardly pays here. Give --size if you want one."
        )
    return found


def drafting_pays(candidates: Sequence[SizeResult]) -> bool:
    """Whether predicted speeds tell sizes apart: some K is worth it, and not all are as fast."""
    speeds = {candidate.predicted_speed for candidate in candidates}
    return len(speeds) > 1 and any(candidate.drafts != 0 for candidate in candidates)


def check_sizes(sizes: Iterable[int], vocab_size: int, num_forced: int) -> None:
    """ConfigError for a size that no vocabulary of the model can have."""
    for size in sizes:
        if size < num_forced:
            raise ConfigError(
                f"--size is {size}; {num_forced} tokens (special, chat template, digits, "
                f"whitespace, bytes) must be in. Give at least {num_forced}."
            )
        if size > vocab_size:
            raise ConfigError(f"--size is {size}; the model has {vocab_size} tokens. Give fewer.")


def choose_size(candidates: Sequence[SizeResult]) -> SizeResult:
    """The highest predicted speed; where that decides nothing, the smallest that covers enough.

    Ties go to the smaller size. Candidates with and without a prediction cannot be compared.
    """
    if not candidates:
        raise ConfigError("no sizes to choose from; give at least one with --sizes.")
    ordered = sorted(candidates, key=lambda c: c.size)
    speeds = [c.predicted_speed for c in ordered if c.predicted_speed is not None]
    if speeds and len(speeds) < len(ordered):
        raise ConfigError("a speed was predicted for some sizes only; predict it for all or none.")
    if speeds and drafting_pays(ordered):
        return ordered[speeds.index(max(speeds))]
    if any(c.coverage is None for c in ordered):
        raise ConfigError(
            "there are no held-out answers to measure coverage on, so no size can be chosen; "
            "give --size."
        )
    return next((c for c in ordered if (c.coverage or 0.0) >= ENOUGH_COVERAGE), ordered[-1])
