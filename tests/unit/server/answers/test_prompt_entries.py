"""Log-probabilities of prompts: how many an answer may hold, and where they are written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headstart.engine.output import Update
from headstart.errors import RequestError
from headstart.sampling.choose import TokenLogprob
from headstart.server import completions
from headstart.server.answers.logprobs import MOST_PROMPT_ENTRIES, check_prompt_entries
from headstart.server.answers.writer import ChatWriter
from headstart.server.channels import Event
from headstart.server.completions import CompletionRequest, CompletionWriter
from headstart.server.protocol.requests import ChatRequest

MODEL: Any = SimpleNamespace(names=["small"], pieces=SimpleNamespace(), fingerprint="")


def jobs(num_tokens: int) -> list[Any]:
    return [SimpleNamespace(asked=SimpleNamespace(ids=[1] * num_tokens))]


def test_too_many_entries_are_refused_by_name() -> None:
    check_prompt_entries(MOST_PROMPT_ENTRIES, 0, 1, "logprobs")
    check_prompt_entries(1 << 30, None, 16, "logprobs")
    with pytest.raises(RequestError, match="at most 1000000") as caught:
        check_prompt_entries(10_000, 20, 16, "logprobs")
    assert caught.value.field == "logprobs"


@pytest.mark.parametrize(("asked", "is_large"), [(None, False), (20, True)])
def test_a_chat_with_scores_of_its_prompt_is_large(asked: int | None, is_large: bool) -> None:
    request = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "a"}], "prompt_logprobs": asked}
    )
    writer = ChatWriter(
        request, jobs(1000), model=MODEL, answer_id="", limited_by=None, new_text=None,
        start="closed",
    )  # fmt: skip
    assert writer.is_large is is_large


def test_scores_of_an_echo_are_made_once_for_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def noted(entries: Any, *rest: Any, **options: Any) -> dict[str, Any]:
        made.append(entries)
        return {"tokens": ["x"]}

    monkeypatch.setattr(completions, "completion_logprobs", noted)
    request = CompletionRequest(prompt="ab", echo=True, logprobs=1, n=5, stream=True)
    writer = CompletionWriter(
        request, jobs(2), model=MODEL, answer_id="", limited_by=None, echoed=["ab"]
    )
    writer.first_chunks()
    scores = [TokenLogprob(1, -1.0, {1: -1.0})]
    update = Update("id", 0, [], "", [], [], None, prompt_logprobs=scores)
    shown = writer.chunks(Event(0, update, None))
    assert [chunk["choices"][0]["logprobs"] for chunk in shown[:5]] == [{"tokens": ["x"]}] * 5
    assert len(made) == 1
