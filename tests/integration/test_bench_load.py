"""The load generator against a server that answers by a script, well or badly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import pytest
from support.bench_server import BenchServer, Script, serving

from headstart.bench.arrivals import LoadOptions
from headstart.bench.client import Client
from headstart.bench.load import Progress, drive
from headstart.bench.measures import measure
from headstart.bench.records import RunRecord
from headstart.bench.target import Target
from headstart.bench.workload import Api, Question, Workload
from headstart.data.conversations import Conversation
from headstart.errors import ServerError

FIRST, GAP = 0.1, 0.03


def question(text: str, *, turns: int = 1, tokens: int = 4) -> Question:
    messages = tuple({"role": "user", "content": f"{text} {turn}"} for turn in range(turns))
    return Question(text, "tests", Conversation(text, "tests", messages), (tokens,) * turns, 5)


def workload(*questions: Question, api: Api = "chat") -> Workload:
    warm_up = (question("warm-up", tokens=1),)
    return Workload(questions=questions, warm_up=warm_up, api=api, temperature=0.0, ignore_eos=True)


def load(
    server: BenchServer, asked: Workload, *, fields: Mapping[str, Any] | None = None,
    timeout_seconds: float = 20.0, progress: list[Progress] | None = None, **options: Any,
) -> RunRecord:  # fmt: skip
    target = Target(url=server.url, fields=fields or {}, timeout_seconds=timeout_seconds)
    watch = (progress if progress is not None else []).append

    async def main() -> RunRecord:
        async with Client(target, asked) as client:
            await client.prepare()
            return await drive(client, LoadOptions(**options), variant="v", watch=watch)

    return asyncio.run(main())


@pytest.mark.parametrize("says", ["token_ids", "usage", "origins"])
def test_times_and_tokens_are_the_scripts(says: str) -> None:
    """Generous, since the machine is busy; benchmarks/bench_accuracy.py holds them to 2 %."""
    script = Script(first_seconds=FIRST, gap_seconds=GAP, tokens_per_chunk=(1, 4), says=says)
    with serving(script) as server:
        asked = workload(*(question(f"q{i}", tokens=11) for i in range(4)))
        run = load(server, asked, concurrency=4)
    found = measure(run)
    assert {request.counted_by for request in run.requests} == {says}
    assert all(request.chunk_tokens == (1, 1, 4, 1, 4) for request in run.requests)
    assert found.ttft_seconds is not None and found.itl_per_token_seconds is not None
    assert found.tpot_seconds is not None and found.itl_per_chunk_seconds is not None
    assert FIRST <= found.ttft_seconds.median < 2 * FIRST
    assert found.itl_per_chunk_seconds.mean == pytest.approx(GAP, rel=0.3)
    assert found.tpot_seconds.mean == pytest.approx(4 * GAP / 10, rel=0.3)
    assert found.itl_per_token_seconds.mean == pytest.approx(4 * GAP / 10, rel=0.3)
    assert found.total_tokens_per_second == pytest.approx(
        (11 + 7) * 4 / run.duration_seconds, rel=1e-6
    )


def test_what_cannot_be_counted_is_noted() -> None:
    with serving(Script(tokens_per_chunk=(2,), says="total")) as server:
        spread = load(server, workload(question("a", tokens=5)))
        server.script.says = "nothing"
        guessed = load(server, workload(question("b", tokens=5)))
    assert spread.requests[0].output_tokens == 5 and "spread over" in str(spread.notes)
    assert guessed.requests[0].output_tokens == 3 and "taken for one token" in str(guessed.notes)
    assert measure(guessed).total_tokens_per_second is None


def test_prompts_that_the_server_knew_are_noted() -> None:
    with serving(Script(prompt_tokens=20)) as server:
        fresh = load(server, workload(question("a"), question("b")))
        server.script.cached_tokens = 16
        known = load(server, workload(question("a"), question("b")))
    assert "prefix cache" not in str(fresh.notes)
    assert "80% of the prompt tokens came from the server's prefix cache" in str(known.notes)


FAILURES = {
    "429": "busy", "500": "server_error", "400": "refused", "drop": "connection", "cut": "cut",
    "end": "cut", "malformed": "malformed", "no choices": "malformed", "error": "stream_error",
    "empty": "empty", "hang": "timeout",
}  # fmt: skip


def test_every_failure_is_named_and_spoils_nothing_else() -> None:
    def fails(prompt: str) -> str | None:
        name = prompt.rsplit(" ", 1)[0]
        return name if name in FAILURES else None

    good = [question(f"good{i}") for i in range(len(FAILURES))]
    bad = [question(name) for name in FAILURES]
    mixed = [q for pair in zip(bad, good, strict=True) for q in pair]
    progress: list[Progress] = []
    with serving(Script(fails=fails)) as server:
        run = load(server, workload(*mixed), concurrency=3, timeout_seconds=1.0, progress=progress)
    found = {request.id: request.failure for request in run.requests if request.failure}
    assert {name: failure.kind for name, failure in found.items()} == FAILURES
    assert found["429"].retry_after_seconds == 0.05 and found["500"].words == "as 500"
    assert found["error"].words == "the engine failed"
    assert sorted(r.id for r in run.answered) == sorted(q.id for q in good)
    assert sum(run.failures.values()) == len(FAILURES) and run.failures["malformed"] == 2
    assert measure(run).output_tokens == 4 * len(good)
    assert (progress[-1].num_done, progress[-1].num_failed) == (len(mixed), len(bad))


def test_a_stream_waits_as_long_as_a_busy_server_asks() -> None:
    with serving(Script(fails=lambda p: "429" if p.startswith("full") else None)) as server:
        run = load(server, workload(*(question(f"full{i}") for i in range(4))), concurrency=1)
    assert run.failures == {"busy": 4}
    assert run.requests[-1].sent_seconds > 3 * 0.05


def test_a_closed_loop_has_as_many_streams_as_asked_and_warms_up_first() -> None:
    asked = workload(*(question(f"q{i}") for i in range(9)))
    with serving(Script(gap_seconds=0.01)) as server:
        run = load(server, asked, concurrency=3)
    assert server.most_open == 3 and run.num_warm_up == 3
    prompts = [body["messages"][-1]["content"] for body in server.asked]
    assert prompts[:4] == ["warm-up 0"] * 4  # one of them tried what the server understands
    assert len(run.requests) == 9 and run.requests[0].sent_seconds == 0


def test_an_open_loop_sends_when_requests_are_due() -> None:
    asked = workload(*(question(f"q{i}") for i in range(6)))
    with serving(Script(first_seconds=0.2)) as server:
        run = load(server, asked, rate=50.0, spacing="constant")
        limited = load(server, asked, rate=50.0, spacing="constant", concurrency=2)
    due = [request.due_seconds - run.requests[0].due_seconds for request in run.requests]
    assert due == pytest.approx([0.02 * i for i in range(6)])
    free, waits = (
        [request.sent_seconds - request.due_seconds for request in one.requests]
        for one in (run, limited)
    )
    assert waits[-1] > 0.2 and measure(limited).wait_seconds is not None
    assert max(free) < waits[-1], "no request waits for others' answers"


def test_turns_follow_each_other_with_the_models_own_answers() -> None:
    with serving(Script()) as server:
        run = load(server, workload(question("talk", turns=3, tokens=2)))
    assert [request.id for request in run.requests] == ["talk/0", "talk/1", "talk/2"]
    roles = [message["role"] for message in server.asked[-1]["messages"]]
    assert roles == ["user", "assistant"] * 2 + ["user"]
    assert server.asked[-1]["messages"][1]["content"] == "word word "


def test_a_turn_after_a_failure_is_not_asked() -> None:
    with serving(Script(fails=lambda p: "500" if p == "talk 1" else None)) as server:
        run = load(server, workload(question("talk", turns=3)))
    assert len(run.requests) == 2 and "1 of 3 requests were not sent" in str(run.notes)


def test_nothing_is_begun_after_the_time_limit() -> None:
    with serving(Script(first_seconds=0.1)) as server:
        asked = workload(*(question(f"q{i}") for i in range(50)))
        run = load(server, asked, concurrency=1, time_limit_seconds=0.25)
    assert 1 <= len(run.requests) <= 4 and not run.failures
    assert "time limit" in str(run.notes)


def test_fields_that_a_server_refuses_are_left_out_before_anything_is_measured() -> None:
    script = Script(refuses=("continuous_usage_stats", "headstart"), says="total")
    with serving(script) as server:
        run = load(server, workload(question("a")), fields={"top_k": 3})
    assert not run.failures
    assert server.asked[-1]["stream_options"] == {"include_usage": True}
    assert "headstart" not in server.asked[-1] and server.asked[-1]["top_k"] == 3


def test_a_variants_fields_are_added_to_ours() -> None:
    with serving(Script()) as server:
        load(server, workload(question("a")), fields={"headstart": {"speculate": 3}})
    assert server.asked[-1]["headstart"] == {"statistics": True, "speculate": 3}


def test_counters_are_taken_from_metrics_and_else_from_answers() -> None:
    def metrics(requests: int) -> str:
        names = ("drafts", "draft_tokens", "accepted_tokens")
        factors = zip(names, (10, 30, 15), strict=True)
        return "".join(f"vllm:spec_decode_num_{n}_total {requests * f}\n" for n, f in factors)

    statistics = {"rounds": 4, "draft_tokens": 8, "accepted_tokens": 6}
    script = Script(metrics=metrics, extra={"headstart": {"statistics": statistics}})
    asked = workload(question("a"), question("b"))
    with serving(script) as server:
        scraped = load(server, asked).speculation
        script.metrics = None
        answered = load(server, asked).speculation
        script.extra = {}
        nothing = load(server, asked)
    assert scraped is not None and (scraped.source, scraped.rounds) == ("vllm", 20)
    assert answered is not None and (answered.source, answered.rounds) == ("responses", 8)
    assert nothing.speculation is None and "no speculation counters" in str(nothing.notes)


def test_answers_that_say_more_about_depths_are_believed_before_metrics() -> None:
    """SGLang's /metrics have rounds and tokens; its answers, what each depth had accepted."""

    def metrics(requests: int) -> str:
        rounds, tokens = 2 * requests, 4 * requests
        return f"sglang:spec_verify_calls_total {rounds}\nsglang:generation_tokens_total {tokens}\n"

    details = {
        "spec_verify_ct": 2, "spec_num_proposed_drafts": 4, "spec_num_correct_drafts": 2,
        "spec_correct_drafts_histogram": [1, 0, 1],
    }  # fmt: skip
    script = Script(metrics=metrics, extra={"sglext": {"spec_tokens_details": details}})
    asked = workload(question("a"), question("b"))
    with serving(script) as server:
        told = load(server, asked).speculation
        script.extra = {}
        scraped = load(server, asked).speculation
    assert told is not None and (told.source, told.conditional) == ("responses", (0.5, 1.0))
    assert scraped is not None and (scraped.source, scraped.conditional) == ("sglang", ())
    assert told.acceptance_length == scraped.acceptance_length == 2.0


def test_a_load_generator_that_is_late_says_so() -> None:
    """Control: the same load without anything in its way is late by much less."""

    class Sluggish(list[Progress]):
        def append(self, progress: Progress) -> None:
            time.sleep(0.2)

    asked = workload(*(question(f"q{i}") for i in range(6)))
    with serving(Script(gap_seconds=0.01)) as server:
        late = load(server, asked, concurrency=2, progress=Sluggish())
        quick = load(server, asked, concurrency=2)
    assert not late.is_valid and late.lag.p99_seconds > 0.15
    assert quick.lag.p99_seconds < late.lag.p99_seconds / 2
    assert quick.lag.limit_seconds == late.lag.limit_seconds


@pytest.mark.parametrize(
    ("fails", "words"),
    [("500", "refuses with status 500: as 500. See"), ("empty", "gives no whole answer .empty: ")],
)
def test_a_server_that_never_answers_is_an_error(fails: str, words: str) -> None:
    with serving(Script(fails=lambda prompt: fails)) as server:
        with pytest.raises(ServerError, match=words):
            load(server, workload(question("a")))


def test_a_server_that_is_not_there_is_an_error() -> None:
    with serving(Script()) as server:
        pass
    with pytest.raises(ServerError, match="cannot be reached") as found:
        load(server, workload(question("a")))
    assert "ssl" not in str(found.value)


def test_a_missing_key_is_told_in_the_servers_words() -> None:
    with serving(Script(key="secret")) as server:
        with pytest.raises(ServerError, match=r"status 401: Give a key\. Put the key into"):
            load(server, workload(question("a")))
