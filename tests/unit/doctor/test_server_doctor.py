"""`headstart doctor URL` beside scripted servers of every kind: what they show, and what not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.bench_server import Script, serving
from support.commands import headstart
from support.tiny_fixture import Tiny

NUMBERS = "spec_decode_num_"


def vllm(accepted: tuple[int, ...], rounds: int = 100) -> str:
    """The page of a server that drafts as many as there are numbers."""
    k = len(accepted)
    lines = [
        f'vllm:{NUMBERS}drafts_total{{engine="0"}} {rounds}',
        f'vllm:{NUMBERS}draft_tokens_total{{engine="0"}} {rounds * k}',
        f'vllm:{NUMBERS}accepted_tokens_total{{engine="0"}} {sum(accepted)}',
        *(
            f'vllm:{NUMBERS}accepted_tokens_per_pos_total{{engine="0",position="{i}"}} {n}'
            for i, n in enumerate(accepted)
        ),
    ]
    return "\n".join(lines)


def seen(script: Script, *words: str) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
    """Exit code, the document, and what the server was asked."""
    with serving(script) as server:
        done = headstart("doctor", server.url, *words, "--json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), server.asked


def always(text: str) -> Callable[[int], str]:
    return lambda requests: text


def test_a_server_is_judged_by_its_counters_since_its_start(tiny: Tiny) -> None:
    version = {"/version": {"version": "0.23.0"}}
    code, found, asked = seen(Script(metrics=always(vllm((60, 30))), pages=version))
    assert (code, found["verdict"], asked) == (0, "healthy", [])
    assert (found["engine"], found["version"], found["speculate"]) == ("vllm", "0.23.0", 2)
    assert found["evidence"]["cumulative_acceptance"] == [0.6, 0.3]
    model = str(tiny("deepseek_v3"))
    script = Script(metrics=always(vllm((2, 0))), pages=version)
    code, found, _ = seen(script, model)
    assert (code, found["verdict"]) == (1, "dead")
    causes = "\n".join(found["likely_causes"])
    assert "recycled_hidden = before_out_norm" in causes, "that release, that family"
    assert f"inspect {model} --probe" in causes


def test_a_promise_beside_the_model_is_held_against_what_is_served(
    tiny: Tiny, tmp_path: Path
) -> None:
    walked = {
        "cumulative_acceptance": [0.9], "cumulative_acceptance_interval": [[0.85, 0.95]],
        "acceptance_length": [1.0, 1.9],
    }  # fmt: skip
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"results": [{"overall": {"walked": walked}}]}))
    script = Script(metrics=always(vllm((60,))))
    code, found, _ = seen(script, "--score", str(file))
    assert (code, found["verdict"]) == (1, "below")
    assert found["promise"] == {"source": "mine.json", "depth_1": 0.9, "low": 0.85}
    with serving(script) as server:
        shown = headstart("doctor", server.url, "--score", str(file))
    assert shown.returncode == 1 and "likely causes" in shown.stdout
    assert "60.0 % of first drafts were accepted" in shown.stdout
    assert "promised were 90.0 % (mine.json)" in shown.stdout


def test_only_what_is_drafted_from_now_on_may_count() -> None:
    pages = iter([vllm((5,), 1000), vllm((85,), 1100)])
    code, found, _ = seen(Script(metrics=lambda requests: next(pages)), "--seconds", "0.01")
    assert (code, found["verdict"]) == (0, "healthy")
    assert found["evidence"]["depth_1"]["low"] == 0.8


def test_requests_of_our_own_are_counted_by_what_they_add() -> None:
    def metrics(requests: int) -> str:  # the first one asks whether the server chats
        return vllm((900 + 8 * requests,), 1000 + 10 * requests)

    code, found, asked = seen(Script(metrics=metrics), "--ask", "7")
    assert (code, found["evidence"]["rounds"]) == (0, 80)
    assert found["evidence"]["depth_1"]["low"] == 0.8
    assert len(asked) == 8 and asked[1]["temperature"] == 0 and asked[1]["return_token_ids"]
    assert len({str(body["messages"]) for body in asked}) == 8


def test_sglang_is_judged_by_rounds_and_tokens() -> None:
    lines = (
        "sglang:spec_verify_calls_total 400\nsglang:generation_tokens_total 420\n"
        "sglang:num_requests_total 10\nsglang:spec_num_steps 3\n"
    )
    info = {"/server_info": {"version": "0.5.23"}}
    code, found, _ = seen(Script(metrics=always(lines), pages=info))
    assert (code, found["verdict"], found["speculate"]) == (1, "dead", 3)
    assert (found["engine"], found["version"]) == ("sglang", "0.5.23")
    assert "sglang#7927" in "\n".join(found["likely_causes"])


@pytest.mark.parametrize(
    ("script", "words", "verdict", "said"),
    [
        (Script(), (), "unknown", "shows no counters at /metrics; have it show them"),
        (Script(metrics=always("sglang:x 1")), (), "unknown", "no round with drafts was counted"),
        (
            Script(metrics=always("vllm:generation_tokens_total 500")), (), "off",
            "not one draft was counted",
        ),
        (
            Script(metrics=always("vllm:generation_tokens_total 5")), (), "unknown",
            "no round with drafts was counted",
        ),
        (Script(), ("--ask", "3"), "unknown", "either nothing is drafted or no draft is accepted"),
        (Script(says="total"), ("--ask", "3"), "unknown", "3 answers came without counters"),
    ],
)  # fmt: skip
def test_what_cannot_be_known_is_said(
    script: Script, words: tuple[str, ...], verdict: str, said: str
) -> None:
    code, found, _ = seen(script, *words)
    assert (code, found["verdict"]) == (1, verdict) and said in found["said"]


def test_without_metrics_answers_tell_then_chunks() -> None:
    details = {"spec_verify_ct": 100, "spec_correct_drafts_histogram": [40, 20, 40]}
    code, found, _ = seen(
        Script(extra={"sglext": {"spec_tokens_details": details}}), "--ask", "1", "--speculate", "2"
    )
    assert (code, found["evidence"]["source"]) == (0, "the answers")
    assert found["evidence"]["depth_1"]["low"] == 0.6
    chunks = Script(tokens_per_chunk=(1, 2, 1, 3), says="usage", refuses=("return_token_ids",))
    code, found, asked = seen(chunks, "--ask", "4")
    assert (code, found["verdict"]) == (0, "healthy")
    assert "each taken for a round" in found["said"]
    assert found["evidence"]["depth_1"]["low"] == pytest.approx(0.5, abs=0.02)
    assert "return_token_ids" in asked[1] and "return_token_ids" not in asked[3]


def test_a_server_that_does_not_chat_continues_texts() -> None:
    refusal = "the model has no chat template"
    script = Script(refuses_chat=refusal, tokens_per_chunk=(2,))
    code, found, asked = seen(script, "--ask", "2")
    assert (code, found["verdict"]) == (0, "healthy") and "prompt" in asked[1]


def test_trouble_is_one_line_and_misuse_is_told_apart() -> None:
    gone = headstart("doctor", "http://127.0.0.1:9")
    assert gone.returncode == 1 and "cannot be reached" in gone.stderr
    with serving(Script(fails=lambda prompt: "500")) as server:
        refused = headstart("doctor", server.url, "--ask", "1")
    assert refused.returncode == 1 and "with status 500" in refused.stderr
    for words in (
        ("doctor", "nowhere"), ("doctor", "http://x", "--for", "serve"), ("doctor", "--ask", "3"),
        ("doctor", "http://x", "--ask", "3", "--seconds", "1"), ("doctor", "--for", "nothing"),
    ):  # fmt: skip
        done = headstart(*words)
        assert done.returncode == 2 and done.stderr.startswith("error: "), words
        assert done.stderr.count("\n") == 1
