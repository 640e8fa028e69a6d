"""Speculation counters that come with an answer: ours, vLLM's, SGLang's and llama.cpp's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, zip_longest
from typing import Any

from headstart.bench.records import Speculation


def speculation_of_response(document: dict[str, Any]) -> Speculation | None:
    """Of a chunk or a whole answer; None where it has none that can be read."""
    for path, read in _READERS.items():
        part: Any = document
        for name in path:
            part = part.get(name) if isinstance(part, dict) else None
        if isinstance(part, dict):
            return read(part)
    return None


def total_speculation(parts: Iterable[Speculation | None]) -> Speculation | None:
    """All together; None where any part is missing, since a part of the sum would mislead."""
    found: list[Speculation] = []
    for part in parts:
        if part is None:
            return None
        found.append(part)
    if not found:
        return None
    drafting = [part for part in found if part.draft_tokens != 0]
    return Speculation(
        source=found[0].source,
        rounds=_sum([part.rounds for part in found]),
        has_plain_rounds=all(part.has_plain_rounds for part in found),
        draft_tokens=_sum([part.draft_tokens for part in found]),
        accepted_tokens=_sum([part.accepted_tokens for part in found]),
        copied_tokens=_sum([part.copied_tokens for part in found]),
        drafted_per_depth=_by_depth([part.drafted_per_depth for part in drafting]),
        accepted_per_depth=_by_depth([part.accepted_per_depth for part in drafting]),
        tried_per_depth=_by_depth([part.tried_per_depth for part in drafting]),
        output_tokens=_sum([part.output_tokens for part in found]),
    )


def _headstart(part: dict[str, Any]) -> Speculation | None:
    """Ours counts rounds without drafts too."""
    return Speculation(
        source="responses",
        rounds=_number(part, "rounds"),
        has_plain_rounds=True,
        draft_tokens=_number(part, "draft_tokens"),
        accepted_tokens=_number(part, "accepted_tokens"),
        copied_tokens=_number(part, "copied_accepted_tokens"),
        drafted_per_depth=_numbers(part.get("draft_tokens_per_depth")),
        accepted_per_depth=_numbers(part.get("accepted_per_depth")),
        tried_per_depth=_numbers(part.get("tried_per_depth")),
    )


def _vllm(part: dict[str, Any]) -> Speculation | None:
    return Speculation(
        source="responses",
        rounds=_number(part, "num_spec_steps"),
        draft_tokens=_number(part, "num_draft_tokens"),
        accepted_tokens=_number(part, "num_accepted_draft_tokens"),
        accepted_per_depth=_from_histogram(_numbers(part.get("acceptance_histogram"))),
    )


def _sglang(part: dict[str, Any]) -> Speculation | None:
    """Its names have changed once; both are read."""
    histogram = part.get("spec_correct_drafts_histogram", part.get("spec_accept_histogram"))
    return Speculation(
        source="responses",
        rounds=_number(part, "spec_verify_ct"),
        draft_tokens=_number(part, "spec_num_proposed_drafts", "spec_proposed_drafts"),
        accepted_tokens=_number(part, "spec_num_correct_drafts", "spec_accepted_drafts"),
        accepted_per_depth=_from_histogram(_numbers(histogram)),
    )


def _llamacpp(part: dict[str, Any]) -> Speculation | None:
    """Its timings are there without speculation too, and do not count rounds."""
    if "draft_n" not in part:
        return None
    return Speculation(
        source="responses",
        draft_tokens=_number(part, "draft_n"),
        accepted_tokens=_number(part, "draft_n_accepted"),
    )


_READERS = {
    ("headstart", "statistics"): _headstart,
    ("metrics", "speculative_decoding"): _vllm,
    ("sglext", "spec_tokens_details"): _sglang,
    ("timings",): _llamacpp,
}


def _from_histogram(rounds_by_accepted: Sequence[int]) -> tuple[int, ...]:
    """Rounds that accepted exactly 0, 1, 2, ... drafts -> drafts accepted at depth 1, 2, ...

    One of rounds that accepted nothing says so of depth 1: it was counted.
    """
    if len(rounds_by_accepted) == 1:
        return (0,)
    return tuple(accumulate(reversed(rounds_by_accepted[1:])))[::-1]


def _number(part: dict[str, Any], *names: str) -> int | None:
    for name in names:
        if type(part.get(name)) is int:
            return int(part[name])
    return None


def _numbers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(number) is not int for number in value):
        return ()
    return tuple(value)


def _sum(numbers: Sequence[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None


def _by_depth(lists: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Depths that a part does not have are 0 there; nothing where a part counted no depth."""
    if not all(lists):
        return ()
    return tuple(sum(depth) for depth in zip_longest(*lists, fillvalue=0))
