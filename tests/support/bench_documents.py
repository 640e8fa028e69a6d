"""Documents of benchmarks, made without measuring anything."""

from __future__ import annotations

from typing import Any

from headstart.bench.arrivals import LoadOptions
from headstart.bench.cells import Point
from headstart.bench.cost import parse_prices
from headstart.bench.document import Measured, make_document
from headstart.bench.measures import parse_limits
from headstart.bench.records import Speculation, VariantRecord
from headstart.bench.study import Study
from headstart.bench.variants import parse_compare
from headstart.bench.workload import Workload
from support.bench_records import request, run


def document(
    slowness: float = 1.0, seed: int = 0, *, streams: tuple[int, ...] = (1,), **more: Any
) -> dict[str, Any]:
    """A result of two variants; every answer takes `slowness` times as long as it should."""
    variants = parse_compare("0,3")
    workload = Workload(questions=(), warm_up=(), api="chat", temperature=0.0, ignore_eos=True)
    records = []
    for variant, own in zip(variants, (1.0, 0.6), strict=True):
        runs = []
        for number in streams:
            answers = [
                request(
                    [(0.1, 1), (own * slowness * (1 + 0.01 * (i * 7 % 5)), 9)], id=f"q{i}",
                    text="a",
                )
                for i in range(10)
            ]  # fmt: skip
            seconds = sum(answer.end_seconds for answer in answers) / number**0.5
            runs.append(
                run(
                    *answers, variant=variant.name, concurrency=number, duration_seconds=seconds,
                    speculation=_counted() if variant.drafts else None,
                )
            )  # fmt: skip
        records.append(VariantRecord(name=variant.name, url="http://x", runs=tuple(runs)))
    study = Study(
        variants=variants, points=[Point(concurrency=n) for n in streams], workload=workload,
        load=LoadOptions(), seed=seed,
    )  # fmt: skip
    return make_document([Measured(study, records)], variants[0], workload={"kind": "load"}, **more)


def whole_document() -> dict[str, Any]:
    """One with every part: three loads, prices, limits, drafts of three depths."""
    return document(
        streams=(1, 4, 16), prices=parse_prices(["2.5,spot=1"], 1), limits=parse_limits("tpot:80")
    )


def _counted() -> Speculation:
    return Speculation(
        source="headstart", rounds=100, draft_tokens=300, accepted_tokens=150,
        drafted_per_depth=(100, 100, 100), accepted_per_depth=(70, 50, 30),
    )  # fmt: skip
