"""Measurements of one stage: all workers in turns, medians, every value kept."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from versus.process import Failed, Worker

Reply = dict[str, Any]
_WARM_TOKENS = 20_000  # of all prompts of a warm-up: enough to compile and capture, and quick
_WARM_SEED = 999
_FIRST_REPEATS, _FIRST_ANSWER = 5, 64
_MOST_REPEATS = 6  # until two of them agree


@dataclass(frozen=True)
class Sizes:
    """Tokens of prompts and answers, and how often everything is measured."""

    prompt: int
    answer: int
    repeats: int
    long: int
    decoding: tuple[int, ...]  # requests that decode while a long prompt is read
    agree: float | None = None  # by how much two repeats may differ for an engine to be warm


@dataclass
class Turns:
    """Asks workers in turns; one that fails leaves the stage, and its error is kept."""

    workers: Sequence[Worker]
    failures: list[str] = field(default_factory=list)

    def ask(self, repeats: int, ask: Callable[[Worker, int], Reply]) -> dict[str, list[Reply]]:
        """Replies by worker; each turn begins with another one."""
        found: dict[str, list[Reply]] = {}
        for repeat in range(repeats):
            for worker in self.workers if repeat % 2 == 0 else self.workers[::-1]:
                try:
                    found.setdefault(worker.name, []).append(ask(worker, repeat))
                except Failed as failure:
                    self.failures.append(f"{worker.name}: {failure}")
                    self.workers = [other for other in self.workers if other is not worker]
                    found.pop(worker.name, None)
        return found


def _until_agreed(
    turns: Turns, agree: float, ask: Callable[[Worker, int], Reply]
) -> dict[str, list[Reply]]:
    """Every worker is asked until two replies in a row took about the same time."""
    found: dict[str, list[Reply]] = {}
    for repeat in range(_MOST_REPEATS):
        settled = [w for w in turns.workers if _agrees(found.get(w.name, []), agree)]
        others = Turns([w for w in turns.workers if w not in settled], turns.failures)
        for name, replies in others.ask(1, _with_seed(ask, repeat)).items():
            found.setdefault(name, []).extend(replies)
        turns.workers = [*settled, *others.workers]
    return {worker.name: found[worker.name] for worker in turns.workers}


def _with_seed(ask: Callable[[Worker, int], Reply], seed: int) -> Callable[[Worker, int], Reply]:
    return lambda worker, _: ask(worker, seed)


def _agrees(replies: Sequence[Reply], agree: float) -> bool:
    last = [reply["seconds"] for reply in replies[-2:]]
    return len(last) == 2 and abs(last[0] - last[1]) <= agree * min(last)


def speeds(turns: Turns, sizes: Sizes, requests: int, *, is_off: bool = False) -> dict[str, Any]:
    """Output tokens per second, prefill included."""

    def ask(worker: Worker, seed: int, prompt: int, tokens: int) -> Reply:
        return worker.ask(
            "answer", requests=requests, prompt=prompt, tokens=tokens, seed=seed, is_off=is_off
        )

    warm = min(sizes.prompt, max(64, _WARM_TOKENS // requests))
    few = min(sizes.answer, 24)
    turns.ask(1, lambda worker, _: ask(worker, _WARM_SEED, warm, few))

    def whole(worker: Worker, seed: int) -> Reply:
        return ask(worker, seed, sizes.prompt, sizes.answer)

    if sizes.agree is None:
        replies = turns.ask(sizes.repeats, whole)
    else:
        replies = _until_agreed(turns, sizes.agree, whole)
    result = {}
    for name, own in replies.items():
        each = [requests * sizes.answer / reply["seconds"] for reply in own]
        counted = each if sizes.agree is None else each[-2:]
        result[name] = {**_median(counted), "cumulative_acceptance": own[-1]["acceptance"]}
        if sizes.agree is not None:
            result[name] |= {"all": each, "is_settled": _agrees(own, sizes.agree)}
    return result


def first_tokens(turns: Turns, sizes: Sizes, prompt: int) -> dict[str, Any]:
    """Time to the first token of a prompt at an idle engine."""

    def ask(worker: Worker, seed: int) -> Reply:
        tokens = min(sizes.answer, _FIRST_ANSWER)
        return worker.ask("first", prompt=prompt, tokens=tokens, seed=seed)

    turns.ask(1, lambda worker, _: ask(worker, _WARM_SEED))
    return _medians(turns.ask(max(_FIRST_REPEATS, sizes.repeats), ask))


def long_prompts(turns: Turns, sizes: Sizes, decoding: int) -> dict[str, Any]:
    """Gaps of decoding requests while a long prompt is read."""

    def ask(worker: Worker, seed: int) -> Reply:
        return worker.ask(
            "long", prompt=sizes.prompt, long=sizes.long, decoding=decoding, seed=seed
        )

    turns.ask(1, lambda worker, _: ask(worker, _WARM_SEED))
    return _medians(turns.ask(sizes.repeats, ask))


def _medians(replies: dict[str, list[Reply]]) -> dict[str, Any]:
    """Of every figure; those of a group inside a reply are named `group.figure`."""
    result: dict[str, Any] = {}
    for name, own in replies.items():
        flat = [dict(_figures(reply)) for reply in own]
        keys = [key for key in flat[0] if all(key in figures for figures in flat)]
        result[name] = {key: _median([figures[key] for figures in flat]) for key in keys}
    return result


def _figures(reply: Reply) -> list[tuple[str, float]]:
    single = [(key, value) for key, value in reply.items() if isinstance(value, int | float)]
    grouped = [
        (f"{key}.{inner}", value)
        for key, group in reply.items()
        if isinstance(group, dict)
        for inner, value in group.items()
    ]
    return single + grouped


def _median(values: list[float]) -> dict[str, Any]:
    return {"value": statistics.median(values), "all": values}
