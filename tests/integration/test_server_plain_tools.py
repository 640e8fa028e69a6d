"""Tools with a model whose chat template has no place for them, and a template from a file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import openai
import pytest
from support.server_runs import served, write_tokenizer
from support.server_threads import serving, small_engine
from support.tiny_fixture import Tiny

from headstart.errors import ConfigError
from headstart.server.options import read_template

PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{# system #}"
)
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "pick",
        "parameters": {
            "type": "object", "properties": {"a": {"type": "integer", "enum": [1, 2]}},
            "required": ["a"],
        },
    },
}  # fmt: skip


@pytest.fixture
def folder(tiny: Tiny, tmp_path: Path) -> Path:
    out = tmp_path / "plain"
    shutil.copytree(served(tiny), out)
    write_tokenizer(out, PLAIN)
    return out


def test_tools_are_described_and_forced_by_a_grammar(folder: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {
        "model": "default", "messages": [{"role": "user", "content": "go"}], "tools": [TOOL],
        "temperature": 0,
    }  # fmt: skip
    with serving(small_engine(folder)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
        named: Any = {"type": "function", "function": {"name": "pick"}}
        for choice in ("required", named):
            (found,) = client.chat.completions.create(
                **asked, tool_choice=choice, max_tokens=160, parallel_tool_calls=False
            ).choices
            assert found.finish_reason == "tool_calls" and found.message.tool_calls
            call: Any = found.message.tool_calls[0]
            assert call.function.name == "pick"
            assert json.loads(call.function.arguments)["a"] in (1, 2)
        history = [
            *asked["messages"], found.message.model_dump(),
            {"role": "tool", "tool_call_id": call.id, "content": "done"},
        ]  # fmt: skip
        free = client.chat.completions.create(**{**asked, "messages": history}, max_tokens=8)
        without = client.chat.completions.create(
            **{**asked, "messages": history, "tools": openai.NOT_GIVEN}, max_tokens=8
        )
        assert free.usage is not None and without.usage is not None
        assert free.usage.prompt_tokens > without.usage.prompt_tokens + 100, "the description"
        client.close()


def test_a_template_from_a_file_is_used_instead(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("TEMPLATE{% for m in messages %}{{ m.content }}{% endfor %}")
    with serving(small_engine(folder), chat_template=str(file)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
        answer = client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": "ab"}], max_tokens=1
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len("TEMPLATEab")
        client.close()


def test_a_file_that_is_no_template_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_template(str(tmp_path / "none.jinja"))
    (tmp_path / "other").write_text("hello")
    with pytest.raises(ConfigError, match="does not mention `messages`"):
        read_template(str(tmp_path / "other"))
