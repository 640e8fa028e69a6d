"""Prompts in every form, and what a model's own files say about sampling."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.tiny_fixture import Tiny

from headstart.checkpoint.reader import Checkpoint
from headstart.data.prompt_reader import PromptReader
from headstart.errors import RequestError

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] == 'user' and 't2' or 't3' }} {{ m['content'] }} "
    "{% endfor %}{% if extra %}t9 {% endif %}{% if add_generation_prompt %}t4{% endif %}"
)


def reader(
    tiny: Tiny,
    out: Path,
    *,
    template: str | None = None,
    generation: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    tokenizer: bool = True,
) -> PromptReader:
    """A copy of a tiny checkpoint with other side files."""
    shutil.copytree(tiny("llama", with_head=False), out)

    def change(name: str, fields: dict[str, Any] | None) -> None:
        if fields is not None:
            path = out / name
            path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    change("tokenizer_config.json", {"chat_template": template} if template else None)
    change("config.json", config)
    if generation is not None:
        (out / "generation_config.json").write_text(json.dumps(generation))
    if not tokenizer:
        (out / "tokenizer.json").unlink()
    return PromptReader(Checkpoint.open(out))


def test_messages_go_through_the_chat_template(tiny: Tiny, tmp_path: Path) -> None:
    own = reader(tiny, tmp_path / "m", template=TEMPLATE)
    messages = [{"role": "user", "content": "t50 t51"}, {"role": "assistant", "content": "t60"}]
    assert own.read(messages) == [2, 50, 51, 3, 60, 4]
    assert own.read(messages, {"extra": True}) == [2, 50, 51, 3, 60, 9, 4]


def test_the_generation_prompt_may_be_left_out(tiny: Tiny, tmp_path: Path) -> None:
    """Regression: giving add_generation_prompt was a TypeError."""
    own = reader(tiny, tmp_path / "m", template=TEMPLATE)
    message = [{"role": "user", "content": "t50"}]
    assert own.read(message, {"add_generation_prompt": False}) == own.read(message)[:-1]


def test_what_a_template_raises_is_the_request_s_fault(tiny: Tiny, tmp_path: Path) -> None:
    template = "{% if bad %}{{ raise_exception('roles must alternate') }}{% endif %}t5"
    own = reader(tiny, tmp_path / "m", template=template)
    message = [{"role": "user", "content": "t50"}]
    assert own.read(message) == [5]
    with pytest.raises(RequestError, match="template refuses these messages: roles must alternate"):
        own.read(message, {"bad": True})
    with pytest.raises(RequestError, match="chat_template_kwargs holds tokenize, which the engine"):
        own.read(message, {"tokenize": True})


@pytest.mark.parametrize("prompt", ["t5", [5, 6]], ids=["text", "ids"])
def test_template_options_without_a_template_are_refused(
    prompt: Any, tiny: Tiny, tmp_path: Path
) -> None:
    own = reader(tiny, tmp_path / "m", template=TEMPLATE)
    with pytest.raises(RequestError, match=r"chat_template_kwargs \(enable_thinking\) were given"):
        own.read(prompt, {"enable_thinking": False})


def test_messages_without_a_template_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="has no chat template; give text or token ids"):
        reader(tiny, tmp_path / "m").read([{"role": "user", "content": "t5"}])


def test_text_without_a_tokenizer_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    own = reader(tiny, tmp_path / "m", tokenizer=False)
    assert own.tokenizer is None
    with pytest.raises(RequestError, match="no tokenizer; give token ids"):
        own.read("t5")
    with pytest.raises(RequestError, match="no tokenizer; give token ids instead of messages"):
        own.read([{"role": "user", "content": "t5"}])
    assert own.read([5, 6]) == [5, 6]


def test_one_prompt_and_several_are_told_apart(tiny: Tiny, tmp_path: Path) -> None:
    own = reader(tiny, tmp_path / "m")
    message = {"role": "user", "content": "t5"}
    assert own.as_list("t5") == ["t5"]
    assert own.as_list([5, 6]) == [[5, 6]]
    assert own.as_list([message]) == [[message]]
    assert own.as_list(["t5", [6], [message]]) == ["t5", [6], [message]]


@pytest.mark.parametrize("prompt", [[1.5], [True, 2], ["t5", 3], [[5]]], ids=str)
def test_anything_else_is_refused(prompt: Any, tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="text, a list of token ids, or a list of messages"):
        reader(tiny, tmp_path / "m").read(prompt)


def test_sampling_defaults_come_from_the_generation_config(tiny: Tiny, tmp_path: Path) -> None:
    generation = {
        "temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.05,
        "do_sample": True,
    }  # fmt: skip
    params = reader(tiny, tmp_path / "m", generation=generation).default_params(top_k=5)
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 5, 0.9)
    assert (params.min_p, params.repetition_penalty) == (0.1, 1.05)


def test_a_model_that_asks_for_no_sampling_keeps_its_penalty(tiny: Tiny, tmp_path: Path) -> None:
    """Regression: repetition_penalty, which acts on greedy text too, was dropped."""
    generation = {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.2}
    params = reader(tiny, tmp_path / "m", generation=generation).default_params()
    assert (params.temperature, params.repetition_penalty) == (0, 1.2)


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [({"eos_token_id": [7, 8]}, {}, {7, 8}), ({"eos_token_id": 7}, {}, {7}),
     ({}, {"eos_token_id": 9}, {9}), ({}, {"eos_token_id": None}, {1}),
     ({"eos_token_id": [1, 100_000]}, {}, {1})],
    ids=["several", "one", "from config", "from tokenizer", "beyond the vocabulary"],
)  # fmt: skip
def test_end_tokens_come_from_the_first_file_that_names_them(
    generation: dict[str, Any], config: dict[str, Any], ends: set[int], tiny: Tiny, tmp_path: Path
) -> None:
    own = reader(tiny, tmp_path / "m", generation=generation, config=config)
    assert own.end_ids == ends
