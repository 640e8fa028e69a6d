"""Chat templates in another process: the same texts, within limits."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.server_runs import TEMPLATE, write_tokenizer

from headstart.errors import RequestError
from headstart.server.refusals import STOPPED, Refusal
from headstart.server.templates import process
from headstart.server.templates.client import SlowTemplate, TemplateProcess

HELLO = [{"role": "user", "content": "hello"}]
HOSTILE = """{%- set said = messages[0].content -%}
{%- if said == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}
{%- endfor %}{% endif %}
{%- if said == 'power' %}{{ 9 ** (9 ** (said | length + 4)) }}{% endif %}
{%- if said == 'large' %}{{ 'x' * 4000000000 }}{% endif %}
{%- if said == 'many' %}{% for a in range(90) %}{{ 'x' * 1000000 }}{% endfor %}{% endif %}
{%- if said == 'raise' %}{{ raise_exception('not this') }}{% endif %}
{{- bos_token }}{{ said }}"""


def tokenizer_of(folder: Path, template: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    write_tokenizer(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    tokenizer.chat_template, tokenizer.bos_token = template, "<s>"
    return tokenizer


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TemplateProcess]:
    folder = tmp_path_factory.mktemp("hostile")
    made = TemplateProcess(tokenizer_of(folder, HOSTILE), max_seconds=0.4)
    yield made
    made.close()


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CONTINUED = [*HELLO, {"role": "assistant", "content": "so "}]
CASES: dict[str, tuple[list[dict[str, str]], dict[str, Any]]] = {
    "plain": (HELLO, {"add_generation_prompt": True}),
    "no prompt to answer": (HELLO, {"add_generation_prompt": False}),
    "tools": (HELLO, {"tools": [TOOL]}),
    "options": (HELLO, {"thinking": False, "add_generation_prompt": True}),
    "continued": (CONTINUED, {"continue_final_message": True}),
    "half a character": (said("a\ud800b\u00e9\U0001f600"), {}),
}


def test_texts_are_those_of_the_tokenizer(tmp_path: Path, hostile: TemplateProcess) -> None:
    tokenizer = tokenizer_of(tmp_path, TEMPLATE)
    hostile._tokenizer, before = tokenizer, hostile._tokenizer  # one process for all tests
    try:
        for name, (messages, options) in CASES.items():
            expected = tokenizer.apply_chat_template(messages, tokenize=False, **options)
            assert hostile.render(messages, options) == expected, name
        tokenizer.chat_template = {"default": "plain", "tool_use": "with tools"}
        assert hostile.render(HELLO, {}) == "plain"
        assert hostile.render(HELLO, {"tools": [TOOL]}) == "with tools"
        tokenizer.chat_template = {"other": "?"}
        with pytest.raises(RequestError, match="refuses these messages: This model has multiple"):
            hostile.render(HELLO, {})
    finally:
        hostile._tokenizer = before


@pytest.mark.parametrize("text", ["loop", "power"])
def test_a_template_that_does_not_end_is_ended(hostile: TemplateProcess, text: str) -> None:
    with pytest.raises(SlowTemplate):
        hostile.render(said(text), {})
    with pytest.raises(RequestError, match=r"takes more than 0\.4 s for these messages"):
        hostile.patiently(hostile.render, said(text), {})
    assert hostile.render(said("hello"), {}) == "<s>hello"
    deadline = time.monotonic() + 10
    while len(forks_of(hostile)) > len(hostile._idle):
        assert time.monotonic() < deadline, "a process that nothing waits for goes on rendering"
        time.sleep(0.02)


def forks_of(templates: TemplateProcess) -> list[str]:
    """Processes that render, or wait for the next messages."""
    assert templates._forks is not None
    parent = templates._forks._process.pid
    return Path(f"/proc/{parent}/task/{parent}/children").read_text().split()


@pytest.mark.parametrize("text", ["large", "many"])
def test_a_template_that_writes_too_much_is_refused(
    hostile: TemplateProcess, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostile, "_max_seconds", 10)  # megabytes take a busy machine longer
    with pytest.raises(RequestError, match="writes more than 64 MiB"):
        hostile.patiently(hostile.render, said(text), {})
    assert hostile.render(said("hello"), {}) == "<s>hello"


def test_a_refusal_of_the_template_is_passed_on(hostile: TemplateProcess) -> None:
    with pytest.raises(RequestError, match="refuses these messages: not this"):
        hostile.render(said("raise"), {})
    with pytest.raises(RequestError, match=r"refuses these messages: .*conversations"):
        hostile.render(HELLO, {"conversations": []})


def test_constants_are_computed_within_the_limits(hostile: TemplateProcess) -> None:
    hostile._tokenizer.chat_template = "{{ 9 ** (9 ** 9) }}"
    try:
        with pytest.raises(SlowTemplate):
            hostile.render(HELLO, {})
    finally:
        hostile._tokenizer.chat_template = HOSTILE


def test_processes_that_are_gone_are_replaced(hostile: TemplateProcess) -> None:
    hostile.render(HELLO, {})
    assert hostile._forks is not None and hostile._idle
    hostile._forks._process.kill()  # its forks end with it
    hostile._forks._process.wait()
    assert hostile.render(said("again"), {}) == "<s>again"


def test_closing_frees_a_thread_that_waits(tmp_path: Path) -> None:
    made = TemplateProcess(tokenizer_of(tmp_path, HOSTILE), max_seconds=300)
    ended: list[str | None] = []

    def wait() -> None:
        try:
            made.patiently(made.render, said("loop"), {})
        except Refusal as error:
            ended.append(error.code)

    made.render(said("hello"), {})
    thread = threading.Thread(target=wait)
    thread.start()
    while thread.is_alive() and made._idle:  # it takes the one that waits
        thread.join(0.01)
    made.close()
    thread.join(20)
    assert ended == [STOPPED] and not thread.is_alive()
    with pytest.raises(Refusal, match="the server was stopped"):
        made.render(HELLO, {})


def test_errors_of_a_template_have_a_bound() -> None:
    def render(*arguments: Any, **options: Any) -> tuple[list[str], Any]:
        raise ValueError("x" * 10_000)

    kind, data = process._rendered(render, {}, "", [], {})
    assert (kind, len(data)) == (process.REFUSED, 2000)
    assert json.dumps(data.decode()) == json.dumps("x" * 2000)
