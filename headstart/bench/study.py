"""Runs a comparison: every load, every repeat, every variant in turn, on servers that are up.

Variants alternate within a repeat and get the same questions, so that what the machine does besides
falls on all of them alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

from headstart.bench.arrivals import LoadOptions
from headstart.bench.cells import Point
from headstart.bench.client import Client
from headstart.bench.load import Progress, drive
from headstart.bench.records import RunRecord, VariantRecord
from headstart.bench.target import Target
from headstart.bench.variants import Variant, alternated
from headstart.bench.workload import CountTokens, Workload
from headstart.errors import ConfigError, ServerError


@dataclass(frozen=True)
class Step:
    """Where a study is, reported with every answer that came."""

    variant: str
    point: Point
    repeat: int
    progress: Progress


Watch = Callable[[Step], None]


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is measured. The workload is the same for all variants, loads and repeats."""

    variants: Sequence[Variant]
    points: Sequence[Point]
    workload: Workload
    load: LoadOptions  # what the points do not say
    repeats: int = 1
    seed: int = 0
    model: str | None = None
    timeout_seconds: float = 600.0
    count_tokens: CountTokens | None = None
    api_key: str | None = field(default=None, repr=False)  # None: as the environment has it

    def on(self, variants: Sequence[Variant]) -> Study:
        """The same with variants that have addresses."""
        return replace(self, variants=variants)

    @property
    def num_requests(self) -> int:
        """Of all runs, warm-up left out."""
        runs = len(self.variants) * len(self.points) * self.repeats
        return runs * self.workload.num_requests


@dataclass
class Runs:
    """What has been measured so far: it is not lost when the rest fails or is interrupted."""

    by_variant: dict[str, list[RunRecord]] = field(default_factory=dict)

    def records(self, study: Study) -> list[VariantRecord]:
        """Those of all variants, in their order; empty where nothing was measured."""
        return [
            VariantRecord(name=v.name, url=v.url, fields=v.fields, runs=tuple(runs))
            for v in study.variants
            if (runs := self.by_variant.get(v.name))
        ]


async def run_study(study: Study, runs: Runs, watch: Watch = lambda step: None) -> None:
    """All of it, into `runs`, one after the other."""
    async with AsyncExitStack() as stack:
        clients = {}
        for variant in study.variants:
            client = await stack.enter_async_context(_client(study, variant))
            await client.prepare()
            await _check_understood(client, variant)
            clients[variant.name] = client
        for point in study.points:
            load = replace(
                study.load, concurrency=point.concurrency or None, rate=point.rate or None
            )
            for repeat in range(study.repeats):
                for variant in alternated(study.variants, repeat):
                    name = variant.name
                    run = await drive(
                        clients[name], load, variant=name, repeat=repeat, seed=study.seed,
                        watch=_watching(watch, name, point, repeat),
                    )  # fmt: skip
                    runs.by_variant.setdefault(name, []).append(run)


def measure_study(study: Study, watch: Watch = lambda step: None) -> Outcome:
    """Run it to its end, or to where a server failed or the user pressed Ctrl-C."""
    runs = Runs()
    try:
        asyncio.run(run_study(study, runs, watch))
    except (ServerError, KeyboardInterrupt) as error:
        return Outcome(runs.records(study), error)
    return Outcome(runs.records(study))


@dataclass(frozen=True)
class Outcome:
    records: list[VariantRecord]
    stopped_by: ServerError | KeyboardInterrupt | None = None  # the rest was not measured

    def raise_if_stopped(self) -> None:
        if self.stopped_by is not None:
            raise self.stopped_by

    @property
    def notes(self) -> list[str]:
        if self.stopped_by is None:
            return []
        why = str(self.stopped_by) or "interrupted"
        return [f"stopped early, so parts are missing: {why}"]


def _client(study: Study, variant: Variant) -> Client:
    target = Target(
        url=variant.url, model=study.model, fields=variant.fields, api_key=study.api_key,
        timeout_seconds=study.timeout_seconds,
    )  # fmt: skip
    return Client(target, study.workload, count_tokens=study.count_tokens)


async def _check_understood(client: Client, variant: Variant) -> None:
    """Most servers take a field they do not know and do nothing: every K would be the same."""
    if "headstart" not in variant.fields:
        return
    answer = await client.ask(client.workload.warm_up[0])
    counted = answer.reader.speculation
    if counted is None or not counted.has_plain_rounds:
        raise ConfigError(
            f"{variant.url} does not say what became of {variant.name}: only Headstart's server "
            "drafts as a request asks. Start the other engine once for each K and give every "
            "server as --url NAME=URL."
        )


def _watching(watch: Watch, variant: str, point: Point, repeat: int) -> Callable[[Progress], None]:
    return lambda progress: watch(Step(variant, point, repeat, progress))
