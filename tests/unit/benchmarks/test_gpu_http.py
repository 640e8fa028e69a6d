"""The comparison over HTTP: loads are the same for every engine, figures are what they say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gpu_http
import pytest
from over_http.client import Answer, has_token, text_of
from over_http.load import CHAT, KINDS, SINGLE, Job, Sizes, Workload, lengths, num_requests
from over_http.report import markdown
from over_http.rows import Row, rows
from over_http.servers import Settings, command
from over_http.summary import counted, counters, percentile, summary, tokens_between
from support.long_runs import long_only, unless_long
from support.server_runs import VOCAB, write_tokenizer

from headstart.calibrate.calibrated import write_calibrated
from headstart.calibrate.given_tokenizer import read_tokenizer

SIZES = Sizes(prompt=40, most_prompt=90, answer=20, most_answer=60, shared=30, own=5, turns=3)


@pytest.fixture
def workload() -> Workload:
    return Workload(
        range(10, 500), lambda ids: " ".join(map(str, ids)), SIZES, temperature=0.4, any_text=".*"
    )


def test_lengths_are_reproducible_and_within_their_limits() -> None:
    sizes = Sizes()
    found = lengths(2000, "8 0", sizes)
    assert found == lengths(2000, "8 0", sizes) != lengths(2000, "32 0", sizes)
    for part, median, most in ((0, 450, 3000), (1, 180, 800)):
        values = sorted(pair[part] for pair in found)
        assert values[0] >= 4 and values[-1] == most
        assert values[1000] == pytest.approx(median, rel=0.1)
    assert [num_requests(n) for n in (1, 8, 32, 128)] == [16, 64, 192, 576]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_asks_the_same_again(kind: str, workload: Workload) -> None:
    jobs = workload.jobs(kind, 8, 0, 12)
    assert jobs == workload.jobs(kind, 8, 0, 12) != workload.jobs(kind, 8, 1, 12)
    assert len(jobs) == (4 if kind == "turns" else 12)
    for job in jobs:
        fields = json.loads(job.body)
        assert fields["stream"] and fields["stream_options"] == {"include_usage": True}
        ends_itself = "response_format" in fields or "tools" in fields
        assert fields.get("ignore_eos", False) is not ends_itself


def test_kinds_differ_in_prompts_and_agree_in_lengths_and_last_tokens(workload: Workload) -> None:
    greedy, sampled = (workload.jobs(kind, 8, 0, 12) for kind in ("greedy", "top_p"))
    for one, other in zip(greedy, sampled, strict=True):
        mine, theirs = one.fields["prompt"], other.fields["prompt"]
        assert len(mine) == len(theirs) and mine[-1] == theirs[-1] and mine != theirs
        assert one.fields["max_tokens"] == other.fields["max_tokens"]
    asked = {json.dumps(sorted(j.fields)) for j in workload.jobs("mixture", 8, 0, len(SINGLE))}
    assert len(asked) == len({"greedy", "sampled", "frequency", "repetition", "logprobs", "json",
                              "tools", "regex"})  # fmt: skip
    prompts = [job.fields["prompt"] for job in workload.jobs("prefix", 8, 0, 3)]
    assert len({tuple(p[:30]) for p in prompts}) == 1 and len({tuple(p) for p in prompts}) == 3


def test_rows_are_kinds_with_the_usual_streams_or_their_own() -> None:
    found = rows(["greedy", "long:1/8", "arrivals"], [1, 32], [4.0])
    assert [(row.kind, row.load) for row in found] == [
        ("greedy", "1"), ("greedy", "32"), ("long", "1"), ("long", "8"), ("arrivals", "4/s"),
    ]  # fmt: skip


def test_a_later_turn_holds_all_that_was_said() -> None:
    job = Job(CHAT, {"messages": [{"role": "user", "content": "a"}]}, ("b", "c"))
    later = job.next_turn("x").next_turn("y")
    assert [m["content"] for m in later.fields["messages"]] == ["a", "x", "b", "y", "c"]
    assert later.later == () and len(job.fields["messages"]) == 1


def test_percentiles_lie_between_their_neighbours() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([0.0, 10.0], 0.99) == pytest.approx(9.9)


def test_speed_is_that_of_the_stretch_in_which_all_streams_are_busy() -> None:
    # Two streams, ten tokens a second each; one stream goes on alone for ten seconds.
    answers = [
        Answer(0, 1, 11, 101), Answer(0, 1, 11, 101), Answer(11, 11, 21, 101),
        Answer(11, 11, 31, 201),
    ]  # fmt: skip
    assert tokens_between(answers, 1, 6) == pytest.approx(102)
    found = summary(answers, 2, 11.0)
    assert found["tokens_per_second"] == pytest.approx(20.2, rel=0.01)
    assert found["whole_tokens_per_second"] == pytest.approx(504 / 31)
    assert found["first_token_seconds"] == {"p50": 0.5, "p99": 1}
    assert found["token_seconds"]["p50"] == pytest.approx(0.1)
    failed = summary([Answer(0, 0, 1, 0, error="HTTP/1.1 400")], 1, 0)
    assert failed == {"requests": 0, "failed": 1, "error": "HTTP/1.1 400"}


def test_counters_of_both_servers_are_read_alike() -> None:
    page = (
        "# HELP x\nvllm:spec_decode_num_drafts_total{engine=\"0\"} 10.0\n"
        "vllm:spec_decode_num_accepted_tokens_total 25\n"
        "vllm:spec_decode_num_accepted_tokens_created 1e9\n"
        "vllm:request_time_per_output_token_seconds_sum{engine=\"0\"} 0.5\n"
        "vllm:request_time_per_output_token_seconds_count{engine=\"0\"} 100\n"
    )  # fmt: skip
    found = counted({}, counters(page))
    assert found["acceptance_length"] == 3.5 and found["server_token_seconds"] == 0.005
    assert found["server_first_token_seconds"] is None and found["round_seconds"] is None
    ours = "headstart:decode_rounds_total 50\nvllm:request_decode_time_seconds_sum 0.4\n"
    found = counted({}, counters(page + ours))
    assert found["tokens_per_round"] == 1.5 and found["round_seconds"] == 0.008


def test_a_role_alone_is_no_token() -> None:
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    role = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    word = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
    assert not has_token(head) and not has_token(head + role)
    assert has_token(head + role + word)
    assert has_token(head + b'data: {"choices":[{"delta":{"role":"assistant","content":"x"}}]}')
    assert text_of(head + role + word + word) == "xx"


def test_the_table_has_ratios_to_the_other_and_to_greedy() -> None:
    def figures(speed: float) -> dict[str, Any]:
        return {"tokens_per_second": speed, "acceptance_length": 2.0, "failed": 0,
                "first_token_seconds": {"p50": 0.1, "p99": 0.2}, "round_seconds": 0.008,
                "token_seconds": {"p50": 0.003, "p99": 0.004}, "client_share": 0.1}  # fmt: skip

    document = {
        "date": "2026-11-16T00", "command": "x", "device": "CPU", "checkpoint": {},
        "engines": {"ours": {}, "vllm": {}}, "failures": ["late"],
        "rows": [
            {"kind": "greedy", "load": "8",
             "engines": {"ours": figures(200), "vllm": figures(100)}},
            {"kind": "json", "load": "8", "engines": {"ours": figures(150)}},
        ],
    }  # fmt: skip
    page = markdown(document)
    assert "| greedy | 8 | 200 / 100 | 2.00 | 1.00 / 1.00 | 2.00 / 2.00 | 100.00 / 100.00 |" in page
    assert "| json | 8 | 150 / - | - | 0.75 / - |" in page and "8.00 / 8.00" in page
    assert "- not measured or failed: late" in page


def test_rows_and_names() -> None:
    assert rows(["greedy", "arrivals"], [1, 8], [4.0]) == [
        Row("greedy", 1), Row("greedy", 8), Row("arrivals", rate=4.0)
    ]  # fmt: skip
    assert Row("arrivals", rate=4.0).load == "4/s"
    assert gpu_http.unique_names(["ours", "ours", "vllm"]) == ["ours", "ours-2", "vllm"]


def test_servers_get_the_same_limits() -> None:
    settings = Settings(Path("m"), 3, 64, 4096, is_together=True, kv_gib=2, memory=0.4,
                        flags={"vllm": ["--dtype", "float32"]})  # fmt: skip
    ours, theirs = (command(engine, 80, settings) for engine in ("ours", "vllm"))
    assert ours[ours.index("--max-running-requests") + 1] == "64" == theirs[
        theirs.index("--max-num-seqs") + 1
    ]  # fmt: skip
    assert ours[-2:] == ["--kv-bytes", str(2 << 30)] and theirs[-2:] == ["--dtype", "float32"]


def test_the_client_takes_what_a_server_streams() -> None:
    found = gpu_http.self_test(4, 20)
    assert found["streams"] == 4 and found["events_per_second"] > 0


@long_only
@pytest.mark.usefixtures("quick_processes")
def test_our_server_is_measured_with_every_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = unless_long(["tools", "turns", "arrivals"], list(KINDS))
    write_tokenizer(tmp_path)
    shape = f"layers=1,hidden=512,intermediate=96,heads=4,kv_heads=2,vocab={VOCAB}"
    model, out = tmp_path / "model", tmp_path / "http.json"
    write_calibrated(shape, 0.8, model, dtype="F32", tokenizer=read_tokenizer(tmp_path))
    options = (
        f"{model} --engines ours --streams 2 --rates 20 --requests 4 --warm 0 --max-len 2048 "
        "--prompt-tokens 12 --most-prompt-tokens 24 --answer-tokens 6 --most-answer-tokens 8 "
        "--shared-tokens 20 --own-tokens 4 --prefix-answer-tokens 4 --turns-tokens 2 "
        "--later-turn-tokens 3 --long-tokens 30 --long-answer-tokens 4 --max-requests 4 "
        "--together --kv-gib 0.05 "
        f"--kinds {','.join(kinds)}"
    )
    flags = ["--ours-flags", "--threads 1 --dtype float32", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["gpu_http.py", *options.split(), *flags])
    assert gpu_http.main() == 0
    document = json.loads(out.read_text())
    assert [row["kind"] for row in document["rows"]] == kinds
    for row in document["rows"]:
        found = row["engines"]["ours"]
        assert found["failed"] == 0 and found["requests"] == 4 and found["acceptance_length"] >= 1
    assert out.with_suffix(".md").read_text() == markdown(document)
