"""A server whose chat template loops: others are served, and a signal ends it."""

from __future__ import annotations

import contextlib
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.server_runs import HTTP, Server, running, served, write_tokenizer
from support.tiny_fixture import Tiny

HOSTILE = """{%- set said = messages[0].content -%}
{%- if said == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}
{%- endfor %}{% endif %}
{%- if said == 'power' %}{{ 9 ** (9 ** (said | length + 4)) }}{% endif %}
{{- '<|user|>' }}{{ said }}<|assistant|>"""


@pytest.fixture(scope="module")
def server(tiny: Tiny, quick_python: str) -> Iterator[Server]:
    folder = served(tiny)
    out = folder.parent / f"{folder.name}-hostile-template"
    shutil.copytree(folder, out)
    write_tokenizer(out, HOSTILE)
    flags = ("--speculate", "0", "--max-template-seconds", "0.4", "--drain-seconds", "0.2")
    with running(Path(out), *flags, python=quick_python) as started:
        yield started


def asked(server: Server, text: str, route: str = "/v1/chat/completions") -> httpx.Response:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    if route != "/tokenize":
        body["max_tokens"] = 2
    return HTTP.post(server.url + route, json=body, timeout=60)


def test_others_are_served_while_templates_loop(server: Server) -> None:
    with ThreadPoolExecutor(3) as pool:
        attacks = [pool.submit(asked, server, text) for text in ("loop", "power")]
        attacks += [pool.submit(asked, server, "loop", "/tokenize")]
        while not attacks[0].done():  # more of these than there are threads for prompts
            assert asked(server, "hello").status_code == 200
            assert asked(server, "hello", "/tokenize").status_code == 200
            assert HTTP.get(f"{server.url}/health").status_code == 200
            is_under_attack = not any(attack.done() for attack in attacks)
            if is_under_attack:
                break
        assert is_under_attack, "others were answered only after the attack"
        for attack in attacks:
            answer = attack.result()
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert "takes more than 0.4 s for these messages" in error["message"]
            assert error["param"] == "messages"
    assert asked(server, "hello").status_code == 200


def test_a_signal_ends_a_server_whose_template_loops(server: Server) -> None:
    with ThreadPoolExecutor(5) as pool:
        attacks = [pool.submit(asked, server, "power") for _ in range(5)]
        assert asked(server, "hello").status_code == 200
        assert server.end(signal.SIGTERM) in (0, 1)
        for attack in attacks:
            with contextlib.suppress(httpx.TransportError):  # where it was cut off
                assert attack.result().status_code in (400, 503)
    assert not [line for line in server.lines if "Traceback" in line], server.lines
