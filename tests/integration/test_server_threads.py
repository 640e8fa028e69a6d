"""Work that takes long is done beside the event loop, and beside other requests' prompts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.server_runs import HTTP
from support.server_threads import Running, serving

from headstart.engine.engine import Engine
from headstart.server.model import ServedModel

SHORT: dict[str, Any] = {"prompt": "abc", "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Running]:
    with serving(engine) as running:
        yield running


def ask(server: Running, fields: dict[str, Any]) -> Any:
    return HTTP.post(f"{server.url}/v1/completions", json=fields, timeout=30)


def test_a_long_prompt_is_decoded_once_and_beside_the_loop(
    engine: Engine, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[str] = []
    decode = ServedModel.decode

    def noted(model: ServedModel, ids: Any) -> str:
        decoded.append(threading.current_thread().name)
        return decode(model, ids)

    monkeypatch.setattr(ServedModel, "decode", noted)
    ids = engine.prompts.tokenizer.encode("some words " * 20)
    answer = ask(server, {**SHORT, "prompt": ids, "n": 4, "echo": True}).json()
    assert all(choice["text"].startswith("some words ") for choice in answer["choices"])
    assert len(decoded) == 1 and decoded[0].startswith("prepare")


def test_a_text_of_megabytes_is_tokenized_beside_the_prompts(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()
    monkeypatch.setattr("headstart.server.app.tokenize", lambda *given: is_over.wait(20) and b"{}")
    with ThreadPoolExecutor() as pool:
        asked = [
            pool.submit(HTTP.post, f"{server.url}/tokenize", json={"prompt": "a"}) for _ in range(6)
        ]
        try:
            assert ask(server, SHORT).status_code == 200
        finally:
            is_over.set()
        assert {answer.result().status_code for answer in asked} == {200}


def test_drawn_seeds_are_told_for_every_prompt_and_can_be_used_again(server: Running) -> None:
    asked = {**SHORT, "max_tokens": 12, "temperature": 5, "headstart": {"statistics": True}}
    first = ask(server, {**asked, "prompt": ["ab", "ab"]}).json()
    seeds = first["headstart"]["statistics"]["seeds"]
    assert len(set(seeds)) == 2 and max(seeds) < 1 << 53
    again = ask(server, {**asked, "prompt": "ab", "seed": seeds[1]}).json()
    assert again["choices"][0]["text"] == first["choices"][1]["text"]


def test_every_name_of_the_model_is_answered_with_itself(server: Running) -> None:
    for name in ("small", "default"):
        assert HTTP.get(f"{server.url}/v1/models/{name}").json()["id"] == name
