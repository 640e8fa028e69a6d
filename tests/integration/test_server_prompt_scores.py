"""Log-probabilities of prompts over HTTP, as lm-eval asks for them: transformers' own numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from support.engine_runs import transformers_model
from support.server_runs import Server, served
from support.tiny_fixture import Tiny

TEXT = "one two three, four: five and six; seven"
ASKED: dict[str, Any] = {"model": "default", "prompt": TEXT, "echo": True, "logprobs": 2}


@pytest.fixture(scope="module")
def http(api_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=api_server.url, verify=False, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def client(api_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{api_server.url}/v1", api_key="x", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def ids(http: httpx.Client) -> list[int]:
    return list(http.post("/tokenize", json={"prompt": TEXT}).json()["tokens"])


@pytest.fixture(scope="module")
def wanted(tiny: Tiny, ids: list[int]) -> list[float]:
    """Of the prompt's tokens from the second on."""
    folder: Path = served(tiny)
    with torch.inference_mode():
        logits = transformers_model(folder)(torch.tensor([ids])).logits[0]
    return [float(row[token]) for row, token in zip(logits.log_softmax(-1), ids[1:], strict=False)]


def test_a_prompt_is_repeated_with_its_log_probabilities(
    client: openai.OpenAI, ids: list[int], wanted: list[float]
) -> None:
    for most in (0, 1, 5):  # nothing but the prompt, as lm-eval asks, and more
        answer = client.completions.create(**ASKED, max_tokens=most, temperature=0)
        (choice,) = answer.choices
        found = choice.logprobs
        assert found is not None and choice.text.startswith(TEXT)
        assert found.token_logprobs is not None and found.token_logprobs[0] is None
        scores = found.token_logprobs[1 : len(ids)]
        assert scores == pytest.approx(wanted, abs=2e-4)
        assert answer.usage is not None and answer.usage.completion_tokens == most
        assert len(found.tokens or ()) == len(ids) + most
        assert "".join(found.tokens or ()).startswith(TEXT)
        offsets = found.text_offset or []
        assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[len(ids) - 1] < len(TEXT)
        assert most == 0 or offsets[len(ids)] == len(TEXT)
        tops = found.top_logprobs or []
        assert tops[0] is None
        for top, value in zip(tops[1 : len(ids)], scores, strict=True):
            assert len(top) in (2, 3) and value in top.values()  # the token itself is among them
        assert any(len(top) == 3 for top in tops[1 : len(ids)])


def test_a_stream_brings_them_with_the_prompt(client: openai.OpenAI, wanted: list[float]) -> None:
    asked = {**ASKED, "max_tokens": 4, "temperature": 1.2, "seed": 3, "n": 2}
    whole = client.completions.create(**asked)
    texts, values = ["", ""], [[], []]
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.logprobs is not None:
                values[choice.index] += choice.logprobs.token_logprobs or []
    assert texts == [choice.text for choice in whole.choices]
    assert values[0][1 : len(wanted) + 1] == pytest.approx(wanted, abs=2e-4)
    assert [len(own) for own in values] == [
        len(choice.logprobs.token_logprobs or ()) if choice.logprobs else 0
        for choice in whole.choices
    ]


def test_several_prompts_have_their_own(http: httpx.Client, wanted: list[float]) -> None:
    body = {**ASKED, "prompt": ["unlike", TEXT], "max_tokens": 1, "logprobs": 1}
    first, second = http.post("/v1/completions", json=body).json()["choices"]
    assert len(first["logprobs"]["token_logprobs"]) == len("unlike") + 1
    assert second["logprobs"]["token_logprobs"][1:-1] == pytest.approx(wanted, abs=2e-4)


def test_vllms_field_gives_them_by_token_id(
    http: httpx.Client, ids: list[int], wanted: list[float]
) -> None:
    body = {"prompt": ids, "prompt_logprobs": 1, "max_tokens": 0, "n": 2}
    for choice in http.post("/v1/completions", json=body).json()["choices"]:
        first, *others = choice["prompt_logprobs"]
        assert first is None and choice["text"] == "" and choice["finish_reason"] == "length"
        found = [entry[str(token)]["logprob"] for entry, token in zip(others, ids[1:], strict=True)]
        assert found == pytest.approx(wanted, abs=2e-4)
        best = [next(iter(e.values())) for e in others if len(e) == 1]
        assert all(one["rank"] == 1 for one in best)
    chat = {"messages": [{"role": "user", "content": TEXT}], "prompt_logprobs": 0, "max_tokens": 1}
    document = http.post("/v1/chat/completions", json=chat).json()
    assert len(document["prompt_logprobs"]) == document["usage"]["prompt_tokens"]


def test_tokens_may_be_written_as_ids(http: httpx.Client, ids: list[int]) -> None:
    body = {**ASKED, "max_tokens": 1, "return_tokens_as_token_ids": True}
    found = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert found["tokens"][: len(ids)] == [f"token_id:{token}" for token in ids]
    assert all(name.startswith("token_id:") for name in found["top_logprobs"][1])
