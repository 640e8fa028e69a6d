"""Cached prefixes are shared by requests of the same salt, and with the option of the same key."""

from __future__ import annotations

from typing import Any

import pytest
from support.engine_runs import start
from support.server_runs import HTTP
from support.server_threads import serving
from support.tiny_fixture import Tiny

from headstart.engine.engine import Engine
from headstart.errors import ConfigError, RequestError
from headstart.sampling.params import SamplingParams
from headstart.server.options import ServerOptions

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize("family", ["mimo", "qwen3_next"])  # blocks alone, and states as well
def test_the_engine_shares_prefixes_within_a_salt(tiny: Tiny, family: str) -> None:
    engine = start(tiny(family), speculate=0, block_size=4, kv_bytes=1 << 26)
    prompt = [number % 7 + 1 for number in range(40)]

    def cached(salt: str | None) -> int:
        (result,) = engine.generate([prompt], PARAMS, cache_salt=salt)
        return result.num_cached_tokens

    assert [cached(None), cached("a"), cached("b")] == [0, 0, 0]
    assert cached(None) == cached("a") == cached("b") > 20
    streamed = list(engine.stream(prompt, PARAMS, cache_salt="c"))
    assert sum(len(update.token_ids) for update in streamed) == 4 and cached("c") > 20
    for salt in ("", 5):
        with pytest.raises(RequestError, match="cache_salt is no text, or an empty one"):
            engine.add(prompt, PARAMS, cache_salt=salt)


def cached(url: str, key: str, text: str, **fields: Any) -> int:
    """Tokens of a prompt that a client with this key is told were cached."""
    answer = HTTP.post(
        f"{url}/v1/completions", headers={"authorization": f"Bearer {key}"},
        json={"prompt": text * 20, "max_tokens": 2, **fields},
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_client_learns_nothing_of_prompts_under_another_salt(engine: Engine) -> None:
    with serving(engine) as server:
        assert cached(server.url, "x", "salted", cache_salt="one") == 0
        assert cached(server.url, "x", "salted", cache_salt="one") > 50
        assert cached(server.url, "x", "salted", cache_salt="two") == 0
        assert cached(server.url, "x", "salted") == 0
        for wrong in ("", 5, "s" * 2000):
            answer = HTTP.post(
                f"{server.url}/v1/completions", json={"prompt": "a", "cache_salt": wrong}
            )
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "cache_salt"


def test_keys_can_have_caches_of_their_own(engine: Engine) -> None:
    with serving(engine, api_key=["one", "two"], separate_key_caches=True) as server:
        assert cached(server.url, "one", "by key") == 0
        assert cached(server.url, "one", "by key") > 50
        assert cached(server.url, "two", "by key") == 0
        assert cached(server.url, "one", "by key", cache_salt="one") == 0
    with serving(engine, api_key=["one", "two"]) as server:
        cached(server.url, "one", "together")
        assert cached(server.url, "two", "together") > 50
    with pytest.raises(ConfigError, match="there is no key; give --api-key"):
        ServerOptions(separate_key_caches=True)
