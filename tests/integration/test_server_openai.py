"""OpenAI's own client against a real server process: every call, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from support.server_runs import Server
from support.server_threads import wait_until

HELLO: Any = [{"role": "user", "content": "hello"}]
ASKED: dict[str, Any] = {"model": "default", "messages": HELLO, "max_tokens": 24, "seed": 5}
SAMPLED = {**ASKED, "temperature": 1.5, "top_p": 1, "extra_body": {"top_k": 0}}


@pytest.fixture(scope="module")
def client(api_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{api_server.url}/v1", api_key="x", max_retries=0) as made:
        yield made


@pytest.fixture
def http(api_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=api_server.url, verify=False) as made:
        yield made


def test_a_chat_is_answered_with_usage_and_a_finish_reason(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASKED, extra_body={"ignore_eos": True})
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason == "length"
    assert answer.object == "chat.completion" and answer.model == "default"
    assert answer.usage is not None and answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24


def test_a_stream_adds_up_to_the_whole_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**SAMPLED)
    chunks = list(
        client.chat.completions.create(
            **SAMPLED, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    said = [chunk.choices[0] for chunk in chunks if chunk.choices]
    text = "".join(choice.delta.content or "" for choice in said)
    assert text == whole.choices[0].message.content
    assert [c.finish_reason for c in said if c.finish_reason] == [whole.choices[0].finish_reason]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1
    assert all("usage" in chunk.model_fields_set for chunk in chunks), "null, and not left out"


def test_events_on_the_wire_end_with_done(http: httpx.Client) -> None:
    body = {"prompt": "a", "max_tokens": 3, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = list(response.iter_lines())
    assert all(line == "" or line.startswith("data: ") for line in lines)
    assert lines[-2:] == ["data: [DONE]", ""]


def test_samples_differ_and_come_under_their_index(client: openai.OpenAI) -> None:
    many = {**SAMPLED, "n": 3}
    whole = client.chat.completions.create(**many)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**many, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3


def test_log_probabilities_come_with_tokens_bytes_and_alternatives(client: openai.OpenAI) -> None:
    asked = {**ASKED, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked).choices[0].logprobs
    assert whole is not None and whole.content is not None
    streamed = [
        entry
        for chunk in client.chat.completions.create(**asked, stream=True)
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content or []
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole.content]
    for entry in whole.content:
        assert entry.bytes is not None and len(entry.top_logprobs) == 2
        assert entry.token == bytes(entry.bytes).decode("utf-8", "replace")
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)  # temperature 0


def test_completions_of_text_and_tokens_and_several_prompts(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    asked: dict[str, Any] = {"model": "small", "max_tokens": 6, "temperature": 0}
    one = client.completions.create(prompt="ab", **asked)
    ids = http.post("/tokenize", json={"prompt": "ab"}).json()["tokens"]
    several = client.completions.create(prompt=["ab", "cd"], n=2, **asked)
    assert client.completions.create(prompt=ids, **asked).choices[0].text == one.choices[0].text
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[1].text == one.choices[0].text != several.choices[2].text
    with_prompt = client.completions.create(prompt="ab", echo=True, **asked)
    assert with_prompt.choices[0].text == "ab" + one.choices[0].text


def test_the_older_log_probabilities_keep_every_token_apart(client: openai.OpenAI) -> None:
    """Tokens are bytes here: many are no text, and characters have several of them."""
    asked: dict[str, Any] = {"model": "small", "max_tokens": 40, "temperature": 0, "prompt": "ab"}
    own = {"structured_outputs": {"regex": "(\u00e9|\u20ac|a|\U0001f600){12}"}}
    for extra in ({"ignore_eos": True}, own):
        choice = client.completions.create(logprobs=5, **asked, extra_body=extra).choices[0]
        assert choice.logprobs is not None
        tokens, text = choice.logprobs.tokens or [], choice.text
        for token, offset in zip(tokens, choice.logprobs.text_offset or [], strict=True):
            if token.startswith("bytes:"):
                data = bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
                assert data in text[offset].encode() or text[offset] == "\ufffd", (token, offset)
            else:
                assert text[offset:].startswith(token) or token == "</s>", (token, offset)
        for token, top in zip(tokens, choice.logprobs.top_logprobs or [], strict=True):
            assert token in top and 5 <= len(top) <= 6
        parts = client.completions.create(logprobs=5, **asked, extra_body=extra, stream=True)
        offsets = [
            offset
            for chunk in parts
            for part in chunk.choices
            if part.logprobs is not None
            for offset in part.logprobs.text_offset or []
        ]
        assert offsets == choice.logprobs.text_offset


def test_a_stop_string_ends_the_answer_and_is_never_shown(client: openai.OpenAI) -> None:
    asked = {**ASKED, "temperature": 0, "max_tokens": 60}
    full = client.chat.completions.create(**asked).choices[0].message.content
    assert full is not None
    at = next(
        i for i in range(8, 40) if full[i : i + 3].isascii() and full.find(full[i : i + 3]) == i
    )
    stop = full[at : at + 3]
    whole = client.chat.completions.create(**asked, stop=[stop, "never"]).choices[0]
    shown = ""
    for chunk in client.chat.completions.create(**asked, stop=stop, stream=True):
        shown += chunk.choices[0].delta.content or ""
        assert full[:at].startswith(shown)  # never a part of the stop string
    assert shown == whole.message.content == full[:at]
    assert whole.finish_reason == "stop" and whole.model_extra == {"stop_reason": stop}


PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.3}
SEVERAL = {"n": 2, **PENALTIES, "logprobs": True, "top_logprobs": 2}


@pytest.mark.parametrize(
    "fields", [{"temperature": 0}, {}, SEVERAL], ids=["greedy", "sampled", "several"]
)
def test_drafts_change_nothing_but_the_counters(
    client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    asked = {**SAMPLED, "max_tokens": 80, **fields}
    texts, accepted, numbers = [], [], list[list[float]]()
    for speculate in ("off", 3):
        own = {"headstart": {"speculate": speculate, "statistics": True}, "ignore_eos": True}
        answer = client.chat.completions.create(**{**asked, "extra_body": {"top_k": 0, **own}})
        texts.append([choice.message.content for choice in answer.choices])
        numbers.append(
            [
                entry.logprob
                for choice in answer.choices
                if choice.logprobs is not None
                for entry in choice.logprobs.content or []
            ]
        )
        statistics = answer.model_extra["headstart"]["statistics"]
        accepted.append((statistics["accepted_tokens"], statistics["draft_tokens"]))
        assert statistics["chosen_k"] == (0 if speculate == "off" else 3)
        assert sum(statistics["accepted_per_depth"]) == statistics["accepted_tokens"]
        assert statistics["time_to_first_token_seconds"] > 0 < statistics["tokens_per_second"]
    assert texts[0] == texts[1] and len(texts[0]) == fields.get("n", 1)
    assert numbers[0] == pytest.approx(numbers[1], abs=1e-4)
    assert len(numbers[0]) == (160 if "logprobs" in fields else 0)
    assert accepted[0] == (0, 0) and 0 < accepted[1][0] < accepted[1][1]


def test_origins_of_tokens_and_their_texts(client: openai.OpenAI) -> None:
    own = {"headstart": {"origins": True}, "ignore_eos": True, "return_token_ids": True}
    stream = client.chat.completions.create(**ASKED, temperature=0, stream=True, extra_body=own)
    seen, texts, ids, shown = [], "", [], ""
    prompts = []
    for chunk in stream:
        prompts += (chunk.model_extra or {}).get("prompt_token_ids", [])
        (choice,) = chunk.choices
        shown += choice.delta.content or ""
        more = choice.model_extra or {}
        ids += more.get("token_ids", [])
        seen += more.get("headstart", {}).get("origins", [])
        texts += "".join(more.get("headstart", {}).get("token_texts", []))
    assert len(prompts) == len("hello") + 2  # once, and with the tokens of the template
    assert set(seen) == {"accepted", "recovered", "bonus"}
    assert len(seen) == len(ids) == 24
    assert shown.startswith(texts.rstrip("\ufffd")) and texts


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_a_request_says_where_its_drafts_come_from(
    api: str, client: openai.OpenAI, http: httpx.Client
) -> None:
    """The text does not change; what was copied is told in origins, statistics and metrics."""
    # An answer that repeats one token can be copied from itself.
    fields: dict[str, Any] = {**ASKED, "temperature": 0, "logit_bias": {"5": 100}}
    create: Any = client.chat.completions.create
    if api == "completions":
        create, fields["prompt"] = client.completions.create, "hello"
        del fields["messages"]
    found = {}
    for source in ("head", "context"):
        own = {"headstart": {"origins": True, "statistics": True, "draft_from": source}}
        answer = create(**fields, extra_body={**own, "ignore_eos": True})
        (choice,) = answer.choices
        told = (answer.model_extra or {})["headstart"]["statistics"]
        origins = (choice.model_extra or {})["headstart"]["origins"]
        assert origins.count("copied") == told["copied_accepted_tokens"]
        assert ("copied" in origins) == (source == "context")
        found[source] = choice.message.content if api == "chat" else choice.text
    assert found["head"] == found["context"]
    metric = "headstart:spec_decode_num_accepted_tokens_by_source_total"
    lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(metric)]
    counts = {source: float(line.split()[-1]) for source in found for line in lines
              if f'source="{source}"' in line}  # fmt: skip
    assert set(counts) == {"head", "context"} and counts["context"] > 0


def test_models_and_names(client: openai.OpenAI, http: httpx.Client) -> None:
    assert [model.id for model in client.models.list()] == ["small", "other"]
    assert client.models.retrieve("other").id == "other"
    card = http.get("/v1/models").json()["data"][0]
    assert card["root"] and card["max_model_len"] == 4096
    for name in ("small", "other", "default"):
        assert client.completions.create(model=name, prompt="a", max_tokens=1).model == name


def test_tokens_there_and_back(http: httpx.Client) -> None:
    text = "h\u00e9llo"
    made = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert made["count"] == len(made["tokens"]) == len(text.encode())
    assert made["max_model_len"] == 4096 and made["token_strs"][0] == "h"
    assert http.post("/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": text}
    chat = http.post("/tokenize", json={"messages": HELLO}).json()["tokens"]
    answer = http.post(
        "/v1/chat/completions", json={"messages": HELLO, "return_token_ids": True, "max_tokens": 2}
    ).json()
    assert answer["prompt_token_ids"] == chat
    assert len(answer["choices"][0]["token_ids"]) == answer["usage"]["completion_tokens"]


def test_health_version_docs_and_metrics(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ready"}
    assert http.get("/version").json()["version"].startswith("0.")
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    assert "top_logprobs" in schemas["ChatRequest"]["properties"]
    docs = http.get("/docs")
    assert docs.status_code == 200 and "top_logprobs" in docs.text
    assert "http" not in docs.text and "<script" not in docs.text, "nothing from elsewhere"
    assert "spec_decode_num_draft_tokens_total" in http.get("/metrics").text


def test_harmless_fields_and_nulls_change_nothing(http: httpx.Client) -> None:
    harmless = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}
    nulls = dict.fromkeys(("stop", "tools", "logit_bias", "suffix", "functions"))
    plain = http.post("/v1/chat/completions", json=ASKED).json()
    more = http.post("/v1/chat/completions", json={**ASKED, **harmless, **nulls}).json()
    assert more["choices"] == plain["choices"]


def test_refusals_arrive_as_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no model is called 'gpt'") as missing:
        client.chat.completions.create(**{**ASKED, "model": "gpt"})
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="top_p is 3") as bad:
        client.chat.completions.create(**{**ASKED, "top_p": 3})
    assert bad.value.param == "top_p"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="small", input="x")


def test_the_asynchronous_client_streams_many_at_once(api_server: Server) -> None:
    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        text = ""
        fields = {**SAMPLED, "seed": seed}
        async for chunk in await client.chat.completions.create(**fields, stream=True):
            text += chunk.choices[0].delta.content or ""
        whole = await client.chat.completions.create(**fields)
        assert whole.choices[0].message.content == text
        return text

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{api_server.url}/v1", api_key="x") as client:
            return await asyncio.gather(*(ask(client, seed) for seed in range(6)))

    assert len(set(asyncio.run(ask_all()))) > 1


def test_every_request_is_one_line_of_the_log_without_its_prompt(
    client: openai.OpenAI, api_server: Server
) -> None:
    asked = {**ASKED, "messages": [{"role": "user", "content": "a-secret"}]}
    answer = client.chat.completions.create(**asked)
    # The line is written when the last byte is sent, and read by another thread.
    wait_until(lambda: any(answer.id in line for line in api_server.lines))
    (line,) = [line for line in api_server.lines if answer.id in line]
    assert "status=200" in line and "output_tokens=" in line
    assert "a-secret" not in json.dumps(api_server.lines)
