"""From text to tokens: prompts as people give them, and a model's own defaults.

A prompt is text, token ids or chat messages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headstart.checkpoint.reader import Checkpoint
from headstart.errors import (
    PromptTooLong,
    RequestError,
    raise_fault,
    some,
)
from headstart.sampling.params import SamplingParams

Message = Mapping[str, Any]
TemplateOptions = dict[str, Any]  # what a chat template is given beside messages: JSON values
Prompt = str | Sequence[int] | Sequence[Message]
Render = Callable[[Sequence[Message], TemplateOptions], str]

_GLANCE = 8  # characters per token; most texts have fewer
_MODEL = "the model"  # clients of a server are told no path of its machine
_OURS = ("conversation", "tokenize", "return_tensors", "return_dict")


class PromptReader:
    """Tokenizer, chat template and generation defaults of one checkpoint."""

    def __init__(self, checkpoint: Checkpoint):
        self._folder, self._config = checkpoint.folder, checkpoint.config.fields
        self._documents = checkpoint.tokenizer_documents()
        self._generation_config = checkpoint.generation_config
        self.most_tokens: int | None = None  # much longer texts are refused before they are read
        self.render: Render = self.render_here  # how a chat template is run

    @cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, or None where it has none."""
        if self._documents:
            with TemporaryDirectory(prefix="headstart-tokenizer-") as folder:
                for name, document in self._documents.items():
                    text = document if isinstance(document, str) else json.dumps(document)
                    Path(folder, name).write_text(text, encoding="utf-8", errors="replace")
                return self._opened(Path(folder))
        if not (self._folder / "tokenizer.json").is_file():
            return None
        return self._opened(self._folder)

    def _opened(self, folder: Path) -> Any:
        # The class itself, not AutoTokenizer: that would want to run a checkpoint's own code.
        from transformers import PreTrainedTokenizerFast

        try:
            return PreTrainedTokenizerFast.from_pretrained(str(folder))
        except BaseException as error:  # whatever the library makes of odd files
            raise_fault(error, self._folder)

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer, from generation_config.json, config.json or the tokenizer.

        Without ids that the model does not have: some configs name tokens of a larger tokenizer.
        """
        given = (part.get("eos_token_id") for part in (self._generation_config, self._config))
        found = next((value for value in given if value is not None), None)
        if found is None:
            found = getattr(self.tokenizer, "eos_token_id", None)
        ids = found if isinstance(found, list) else [] if found is None else [found]
        vocab = self._config.get("vocab_size", math.inf)
        return frozenset(token for token in ids if 0 <= token < vocab)

    def default_params(self, **changes: Any) -> SamplingParams:
        """Sampling as generation_config.json asks for it."""
        known = self._generation_config
        fields = {
            "temperature": known.get("temperature"),
            "top_k": known.get("top_k"),
            "top_p": known.get("top_p"),
            "min_p": known.get("min_p"),
            "repetition_penalty": known.get("repetition_penalty"),
        }
        if known.get("do_sample") is False:
            fields = {"temperature": 0.0, "repetition_penalty": known.get("repetition_penalty")}
        given = {name: value for name, value in fields.items() if value is not None}
        return SamplingParams(**{**given, **changes})

    def as_list(self, prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
        """One prompt or several, told apart by what is inside."""
        if isinstance(prompts, str):
            return [prompts]
        items: list[Any] = list(prompts)
        return [items] if items and isinstance(items[0], int | Mapping) else items

    def read(self, prompt: Prompt, chat_template_kwargs: dict[str, Any] | None = None) -> list[int]:
        """Token ids of a prompt."""
        if not isinstance(prompt, str):
            items: list[Any] = list(prompt)
            if items and isinstance(items[0], Mapping):
                return self._chat(items, chat_template_kwargs or {})
            _refuse_template_options(chat_template_kwargs)
            if not set(map(type, items)) <= {int}:
                raise RequestError(
                    "a prompt is text, a list of token ids, or a list of messages.", field="prompt"
                )
            return items
        _refuse_template_options(chat_template_kwargs)
        if self.tokenizer is None:
            raise RequestError(
                "the model has no tokenizer; give token ids instead of text.",
                field="prompt",
            )
        return self.encode(prompt)

    def _chat(self, messages: list[Message], template_options: dict[str, Any]) -> list[int]:
        if self.tokenizer is None:
            raise RequestError(
                "the model has no tokenizer; give token ids instead of messages.",
                field="prompt",
            )
        if not getattr(self.tokenizer, "chat_template", None):
            raise RequestError(
                "the model has no chat template; give text or token ids instead.",
                field="prompt",
            )
        taken = [name for name in template_options if name in _OURS]
        if taken:
            raise RequestError(
                f"chat_template_kwargs holds {some(taken)}, which the engine sets itself. Leave "
                "it out.",
                field="chat_template_kwargs",
            )
        _refuse_pictures(messages)
        text = self.render(messages, {"add_generation_prompt": True, **template_options})
        return self.encode(text, add_special_tokens=False)

    def render_here(self, messages: Sequence[Message], options: TemplateOptions) -> str:
        """The text of messages, by a template that runs in this process."""
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:  # a template is a program: it may raise anything
            raise refused_by_template(str(error) or type(error).__name__) from error
        return str(text)

    def encode(self, text: str, **options: Any) -> list[int]:
        """Tokens of a text; of one of megabytes, first of its beginning: all take seconds."""
        if self.most_tokens is not None and len(text) > 2 * _GLANCE * self.most_tokens:
            found = len(self._encoded(text[: _GLANCE * self.most_tokens]))
            if found > 1.1 * self.most_tokens + 64:  # a cut may change tokens around it
                raise PromptTooLong(
                    f"the prompt has over {found} tokens; prompt and answer together may have "
                    f"{self.most_tokens} (max_model_len, or the K/V memory). Shorten it.",
                    field="prompt",
                )
        return self._encoded(text, **options)

    def _encoded(self, text: str, **options: Any) -> list[int]:
        try:
            return list(self.tokenizer.encode(text, **options))
        except BaseException as error:
            raise_fault(error, _MODEL, partial(RequestError, field="prompt"))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        try:
            return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))
        except BaseException as error:
            raise_fault(error, _MODEL, RequestError)


def refused_by_template(why: str) -> RequestError:
    return RequestError(
        f"the chat template refuses these messages: {why}. Change the messages or "
        "chat_template_kwargs.",
        field="prompt",
    )


def _refuse_pictures(messages: list[Message]) -> None:
    """A template would write a place for them into the text, and the model would see none."""
    parts = [p for m in messages if isinstance(m.get("content"), list) for p in m["content"]]
    others = {str(p.get("type")) for p in parts if isinstance(p, Mapping)} - {"text"}
    if others:
        raise RequestError(
            f"a message holds parts of type {some(sorted(others))}; this engine reads text only. "
            "Leave them out, or serve the model with an engine that `headstart launch` knows."
        )


def _refuse_template_options(options: dict[str, Any] | None) -> None:
    if options:
        raise RequestError(
            f"chat_template_kwargs ({some(options)}) were given with a prompt that goes through no "
            "template. Give chat messages, or leave them out.",
            field="chat_template_kwargs",
        )
