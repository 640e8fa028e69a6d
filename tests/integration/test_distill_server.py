"""`headstart distill --server`: any OpenAI-compatible server, well or not."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.chat_server import ChatServer, Reply, serving
from support.distill_runs import chat_model, contents, run, write_prompts
from support.tiny_fixture import Tiny

from headstart.checkpoint.reader import Checkpoint
from headstart.data.dataset import Dataset
from headstart.data.journal import read_journal
from headstart.data.prompt_reader import PromptReader
from headstart.distill import retrying
from headstart.errors import DataError, HeadstartError, MissingExtra, ServerError
from headstart.simulate.answers import GREEDY
from headstart.simulate.plan import make_plan
from headstart.train.validation import validated_answers

NUM_ANSWERS = 16  # of 12 prompts, every third with two turns


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "_FIRST_SECONDS", 0.002)
    monkeypatch.setattr(retrying, "_LONGEST_SECONDS", 0.02)
    monkeypatch.delenv("HEADSTART_API_KEY", raising=False)


@pytest.fixture(scope="module")
def model(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tiny, tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="module")
def render(model: Path) -> Callable[[Any], list[int]]:
    return PromptReader(Checkpoint.open(model)).read


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "asked.jsonl")


def ask(server: ChatServer, model: Path, prompts: Path, out: Path, **options: Any) -> list[str]:
    """Distill from the server; returns what the user was told."""
    told: list[str] = []
    with serving(server):
        run(model, prompts, out, server=server.url, warn=told.append, **options)
    return told


def error(status: int, message: str = "no", **headers: str) -> Reply:
    return status, {"error": {"message": message}}, headers


def test_exact_ids_and_turns_come_from_a_healthy_server(
    model: Path, prompts: Path, render: Callable[[Any], list[int]], tmp_path: Path
) -> None:
    four = threading.Barrier(4, timeout=20)  # no answer before four requests are there

    def together(number: int, body: dict[str, Any]) -> None:
        if number < 4:
            four.wait()

    server = ChatServer(render, fails=together)
    assert ask(server, model, prompts, tmp_path / "d", api_key="secret", concurrency=4) == []
    _, answers = read_journal(tmp_path / "d" / "journal.jsonl")
    assert len(answers) == len(server.asked) == NUM_ANSWERS
    assert all(answer.exact_ids for answer in answers)
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert server.most_open == 4
    by_seed = {answer.server_seed: answer for answer in answers}
    assert len(by_seed) == NUM_ANSWERS
    for body in server.asked:
        answer = by_seed[body["seed"]]
        assert list(answer.prompt_ids) == render(body["messages"])
        assert answer.answer_ids[-1] == 1
        assert (body["model"], body["temperature"], body["top_p"]) == ("the-model", 1.0, 1.0)
        assert "top_k" not in body  # 0 means all: not every server would know it
        assert body["repetition_penalty"] == 1.0  # or the server takes the model's default
    second = next(body for body in server.asked if len(body["messages"]) == 3)
    first = next(a for a in answers if a.key == (by_seed[second["seed"]].prompt_id, 0, 0))
    assert second["messages"][1] == {"role": "assistant", "content": first.text}


def test_a_servers_noise_is_never_replayed_as_ours(
    model: Path, prompts: Path, render: Callable[[Any], list[int]], tmp_path: Path
) -> None:
    """Exact ids and a seed that was sent do not make the server's text ours."""
    ask(ChatServer(render), model, prompts, tmp_path / "d", heldout=1.0)
    records = Dataset.open(tmp_path / "d").records("heldout")
    assert all(record.exact_ids and record.seed is None for record in records)
    plan = make_plan(records, None, "match")
    assert plan.method == "formula" and "cannot be replayed" in plan.reason
    for record in records:
        (answer,) = validated_answers(record, 0, 64)
        assert answer.params == GREEDY  # arg-max drafts against the text, as documented
    own = [replace(record, seed=1) for record in records]  # control: as the engine's would be
    assert make_plan(own, None, "match").method == "replay"
    assert validated_answers(own[0], 0, 64)[0].params.temperature == 1.0


def test_a_server_that_fails_now_and_then_gives_the_same_dataset(
    model: Path, prompts: Path, render: Callable[[Any], list[int]], tmp_path: Path
) -> None:
    ask(ChatServer(render), model, prompts, tmp_path / "well")
    kinds: list[Any] = [
        error(429), error(500), "drop", None, error(503, **{"Retry-After": "0.01"}), "nonsense",
        error(429, **{"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}), None,
    ]  # fmt: skip

    def now_and_then(number: int, body: dict[str, Any]) -> Any:
        return kinds[number % len(kinds)]

    server = ChatServer(render, fails=now_and_then)
    ask(server, model, prompts, tmp_path / "ill", concurrency=3, retries=30)
    assert len(server.asked) > NUM_ANSWERS == server.answered
    assert contents(tmp_path / "ill") == contents(tmp_path / "well")


def test_a_server_that_dies_costs_nothing_that_was_received(
    model: Path, prompts: Path, render: Callable[[Any], list[int]], tmp_path: Path
) -> None:
    out = tmp_path / "d"
    dying = ChatServer(render, fails=lambda number, body: None if number < 5 else error(500, "oom"))
    with pytest.raises(ServerError, match=r"failed 3 times, last with status 500 \(oom\)"):
        ask(dying, model, prompts, out, concurrency=2, retries=2)
    _, kept = read_journal(out / "journal.jsonl")
    assert len(kept) == 5
    healthy = ChatServer(render)
    ask(healthy, model, prompts, out)
    assert len(healthy.asked) == NUM_ANSWERS - 5
    assert read_journal(out / "journal.jsonl")[1][:5] == kept


def test_nobody_at_the_address_is_one_clear_line(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    with pytest.raises(ServerError, match="failed 2 times, last with ConnectError"):
        run(model, prompts, tmp_path / "d", server="http://127.0.0.1:9/v1/", retries=1)


def test_text_is_tokenised_again_where_a_server_has_no_ids(
    model: Path, prompts: Path, render: Callable[[Any], list[int]], tmp_path: Path
) -> None:
    ask(ChatServer(render), model, prompts, tmp_path / "exact")
    told = ask(ChatServer(render, gives_ids=False), model, prompts, tmp_path / "again")
    assert [text.split(":")[0] for text in told] == ["the server returns no token ids"]
    exact = read_journal(tmp_path / "exact" / "journal.jsonl")[1]
    again = read_journal(tmp_path / "again" / "journal.jsonl")[1]
    assert not any(answer.exact_ids for answer in again)
    # This tokenizer has one way to write a text, so here nothing is lost but the certainty.
    assert {a.key: list(a.answer_ids) for a in exact} == {a.key: list(a.answer_ids) for a in again}
    assert {a.key: list(a.prompt_ids) for a in exact} == {a.key: list(a.prompt_ids) for a in again}


def test_fields_that_a_server_does_not_know_are_left_out(
    model: Path, prompts: Path, render: Callable[[Any], list[int]], tmp_path: Path
) -> None:
    def strict(number: int, body: dict[str, Any]) -> Any:
        unknown = [n for n in ("min_p", "repetition_penalty", "return_token_ids") if n in body]
        return error(400, f"unknown field {unknown[0]}") if unknown else None

    server = ChatServer(render, fails=strict)
    ask(server, model, prompts, tmp_path / "d", concurrency=1)
    assert server.answered == NUM_ANSWERS
    assert len(server.asked) == NUM_ANSWERS + 3


def test_a_refused_prompt_is_reported_and_the_others_answered(
    model: Path, prompts: Path, render: Callable[[Any], list[int]], tmp_path: Path
) -> None:
    def one(number: int, body: dict[str, Any]) -> Any:
        is_long = body["messages"][0]["content"].startswith("t13 ")
        return error(400, "too long") if is_long else None

    server = ChatServer(render, fails=one)
    told: list[str] = []
    with serving(server):
        outcome = run(model, prompts, tmp_path / "d", server=server.url, warn=told.append)
    report = outcome.header.report["refused"]
    assert report == {"count": 1, "examples": {"q2": "the server says 400: too long"}}
    assert outcome.num_new == NUM_ANSWERS - 1


@pytest.mark.parametrize(
    ("reply", "expected", "found"),
    [
        (error(401), ServerError, "answers 401 .* Give --api-key"),
        (error(404), ServerError, "answers 404 .* Check the URL"),
        (error(422, "top_k?"), ServerError, "refuses every prompt; it says 422: top_k?"),
        ((200, {"choices": []}, {}), ServerError, "answered without choices and message"),
        ((200, {"choices": [{"message": {"content": "t5"}, "token_ids": [99]}],
                "prompt_token_ids": [5]}, {}), DataError, "returned token 99; the model has 64"),
    ],
    ids=["no key", "no model", "no prompt", "no chat", "another model"],
)  # fmt: skip
def test_what_cannot_work_is_said_at_once(
    reply: Reply,
    expected: type[HeadstartError],
    found: str,
    model: Path,
    prompts: Path,
    render: Callable[[Any], list[int]],
    tmp_path: Path,
) -> None:
    server = ChatServer(render, fails=lambda number, body: reply)
    with pytest.raises(expected, match=found):
        ask(server, model, prompts, tmp_path / "d", concurrency=1)
    assert len(server.asked) <= 3


def test_reasoning_that_was_cut_out_is_not_lost_in_silence(
    model: Path, prompts: Path, render: Callable[[Any], list[int]], tmp_path: Path
) -> None:
    server = ChatServer(render, gives_ids=False, extra={"reasoning_content": "hm"})
    with pytest.raises(ServerError, match="without a reasoning parser"):
        ask(server, model, prompts, tmp_path / "d")


def test_another_template_at_the_server_is_noticed(
    model: Path, prompts: Path, render: Callable[[Any], list[int]], tmp_path: Path
) -> None:
    server = ChatServer(lambda messages: [7, *render(messages)])
    (told,) = ask(server, model, prompts, tmp_path / "d")
    assert "renders prompts otherwise" in told
    assert all(a.prompt_ids[0] == 7 for a in read_journal(tmp_path / "d" / "journal.jsonl")[1])


def test_without_httpx_the_extra_is_named(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(MissingExtra, match=r"pip install 'headstart\[train\]'"):
        run(model, prompts, tmp_path / "d", server="http://127.0.0.1:9")
    assert not (tmp_path / "d").exists()
