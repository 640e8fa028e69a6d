"""Tables and the page, made from documents; what they look like is for tests/browser."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.bench_documents import document, whole_document
from support.bench_records import request, run

from headstart.bench.arrivals import LoadOptions
from headstart.bench.cells import Point, speculation_json
from headstart.bench.cost import parse_prices
from headstart.bench.document import Measured, _notes, make_document
from headstart.bench.page import make_page
from headstart.bench.records import Failure, Lag, Speculation, VariantRecord
from headstart.bench.rows import (
    acceptance_rows,
    comparison_rows,
    cost_rows,
    rates,
    spread_rows,
    xllm_rows,
)
from headstart.bench.study import Study
from headstart.bench.variants import parse_compare
from headstart.bench.workload import Workload
from headstart.cli.bench_view import show


def test_rows_have_the_columns_of_xllms_table_and_stand_together_by_load() -> None:
    rows = xllm_rows(whole_document())
    assert rows[0][:6] == [
        "method", "load", "mean TPOT ms", "mean TTFT ms", "output tokens/s", "total tokens/s",
    ]  # fmt: skip
    assert [row[:2] for row in rows[1:5]] == [
        ["K=0", "1"], ["K=3", "1"], ["K=0", "4"], ["K=3", "4"],
    ]  # fmt: skip
    made = (spread_rows, comparison_rows, acceptance_rows, cost_rows)
    for rows in (of(whole_document()) for of in made):
        assert len(rows) > 1 and {len(row) for row in rows} == {len(rows[0])}


def test_acceptance_is_always_said_to_be_cumulative_or_conditional() -> None:
    heads, first = acceptance_rows(whole_document())[:2]
    assert first[heads.index("cumulative")] == "0.70 0.50 0.30"
    assert first[heads.index("conditional")] == "0.70 0.71 0.60"
    assert "cumulative share accepted" in make_page(whole_document()).render()


def test_what_was_copied_is_shown_where_a_server_says_it() -> None:
    document = whole_document()
    assert "of drafts copied" not in acceptance_rows(document)[0]
    drafting = next(cell for cell in document["cells"] if cell["speculation"] is not None)
    drafting["speculation"] |= {"copied_tokens": 3, "copied_share": 0.25}
    heads, *rows = acceptance_rows(document)
    place = heads.index("of drafts copied")
    assert [row[place] for row in rows].count("25 %") == 1
    assert {len(row) for row in rows} == {len(heads)}


def failed_document() -> dict[str, Any]:
    """Nothing was answered, and late at that."""
    variants = parse_compare("0,3")
    broken = request(id="q", failure=Failure("server_error", "out of memory", 500))
    late = Lag(p99_seconds=1.0, limit_seconds=0.002)
    records = [
        VariantRecord(
            name=v.name,
            url="http://x",
            runs=(run(broken, variant=v.name, concurrency=1, lag=late),),
        )
        for v in variants
    ]
    workload = Workload(questions=(), warm_up=(), api="chat", temperature=0.0, ignore_eos=True)
    study = Study(
        variants=variants, points=[Point(concurrency=1)], workload=workload, load=LoadOptions()
    )
    return make_document(
        [Measured(study, records)], variants[0], workload={}, prices=parse_prices(["2"], 1)
    )


def test_a_run_without_answers_is_shown_as_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    found = failed_document()
    json.dumps(found, allow_nan=False)
    show(found)
    text = capsys.readouterr().out
    assert text.startswith("INVALID")
    assert "1 of 1 requests failed (1 server_error)" in text
    assert "INVALID" in make_page(found).render()


def test_the_page_keeps_the_document_but_not_every_request() -> None:
    page = make_page(document()).render()
    assert '"speed_up"' in page and '"latency_seconds":' in page
    assert '"ttft_seconds":0.1,' not in page


def test_tables_fit_into_a_hundred_columns(capsys: pytest.CaptureFixture[str]) -> None:
    show(whole_document())
    tables = capsys.readouterr().out.split("\n> ")[0].splitlines()
    assert max(map(len, tables)) <= 100
    figures = [line for line in tables if line.startswith(("K=0", "K=3"))]
    assert len(figures) == 6 * 3 + 3 + 3 + 6
    assert all(line.count("(") == line.count(")") for line in tables)  # no interval is folded


def test_notes_that_differ_in_numbers_only_are_told_once() -> None:
    runs = [run(notes=(f"{share}% came from the cache", "same")) for share in (10, 20, 20)]
    assert _notes(runs) == [
        "10% came from the cache (1 more, see `runs` in --json or --out)", "same",
    ]  # fmt: skip


def test_a_server_that_counts_rounds_only_still_has_an_acceptance_length() -> None:
    found = whole_document()
    for cell in found["cells"]:
        if cell["variant"] == "K=3":  # as SGLang's /metrics say it
            sglang = Speculation(source="sglang", rounds=50, output_tokens=120)
            cell["speculation"] = speculation_json(sglang)
    heads, first = acceptance_rows(found)[:2]
    assert first[heads.index("acceptance length")] == pytest.approx(2.4)
    assert first[heads.index("cumulative")] is None
    assert "Acceptance length: tokens per trunk pass" in make_page(found).render()


def test_the_page_says_why_there_is_no_acceptance() -> None:
    found = whole_document()
    none = speculation_json(Speculation(source="headstart", rounds=9, draft_tokens=0))
    for cell in found["cells"]:
        cell["speculation"] = none
    assert "No drafts were made." in make_page(found).render()
    for cell in found["cells"]:
        cell["speculation"] = none if cell["variant"] == "K=0" else None
    assert (
        "no speculation counters, in /metrics or in answers, of K=3." in make_page(found).render()
    )


def test_a_rate_that_is_not_known_is_no_number() -> None:
    assert rates([0.5, None, 1.0]) == "0.50 ? 1.00" and rates([]) is None
