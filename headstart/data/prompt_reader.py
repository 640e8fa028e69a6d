"""Prompts as people give them: text, token ids, chat messages; and a model's own defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from headstart.checkpoint.reader import Checkpoint
from headstart.errors import PromptTooLong, RequestError, some
from headstart.sampling.params import SamplingParams

Message = Mapping[str, Any]
TemplateOptions = dict[str, Any]  # what a chat template is given beside messages: JSON values
Prompt = str | Sequence[int] | Sequence[Message]


_GLANCE = 8  # characters per token; most texts have fewer
_OURS = ("conversation", "tokenize", "return_tensors", "return_dict")


class PromptReader:
    """Tokenizer, chat template and generation defaults of one checkpoint."""

    def __init__(self, checkpoint: Checkpoint):
        self._folder, self._config = checkpoint.folder, checkpoint.config.fields
        self._generation_config = checkpoint.generation_config
        self.most_tokens: int | None = None  # much longer texts are refused before they are read

    @cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, or None where it has none."""
        if not (self._folder / "tokenizer.json").is_file():
            return None
        # The class itself, not AutoTokenizer: that would want to run a checkpoint's own code.
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(self._folder))

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer, from generation_config.json, config.json or the tokenizer."""
        for part in (self._generation_config, self._config):
            value = part.get("eos_token_id")
            if value is not None:
                return frozenset(value if isinstance(value, list) else [value])
        found = getattr(self.tokenizer, "eos_token_id", None)
        return frozenset() if found is None else frozenset([found])

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
        items = list(prompts)
        if items and isinstance(items[0], int | Mapping):
            return [items]  # type: ignore[list-item]
        return items  # type: ignore[return-value]

    def read(self, prompt: Prompt, chat_template_kwargs: dict[str, Any] | None = None) -> list[int]:
        """Token ids of a prompt."""
        if not isinstance(prompt, str):
            items = list(prompt)
            if items and isinstance(items[0], Mapping):
                return self._chat(items, chat_template_kwargs or {})  # type: ignore[arg-type]
            _refuse_template_options(chat_template_kwargs)
            if not set(map(type, items)) <= {int}:
                raise RequestError(
                    "a prompt is text, a list of token ids, or a list of messages.", field="prompt"
                )
            return items  # type: ignore[return-value]
        _refuse_template_options(chat_template_kwargs)
        if self.tokenizer is None:
            raise RequestError(
                f"{self._folder} has no tokenizer; give token ids instead of text.",
                field="prompt",
            )
        return self.encode(prompt)

    def _chat(self, messages: list[Message], template_options: dict[str, Any]) -> list[int]:
        if self.tokenizer is None:
            raise RequestError(
                f"{self._folder} has no tokenizer; give token ids instead of messages.",
                field="prompt",
            )
        if not getattr(self.tokenizer, "chat_template", None):
            raise RequestError(
                f"{self._folder} has no chat template; give text or token ids instead.",
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
        options = {"add_generation_prompt": True, **template_options}
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:  # a template is a program: it may raise anything
            raise RequestError(
                f"the chat template refuses these messages: {str(error) or type(error).__name__}. "
                "Change the messages or chat_template_kwargs.",
                field="prompt",
            ) from error
        return self.encode(text, add_special_tokens=False)

    def encode(self, text: str, **options: Any) -> list[int]:
        """Tokens of a text; of one of megabytes, first of its beginning: all take seconds."""
        if self.most_tokens is not None and len(text) > 2 * _GLANCE * self.most_tokens:
            found = len(self.tokenizer.encode(text[: _GLANCE * self.most_tokens]))
            if found > 1.1 * self.most_tokens + 64:  # a cut may change tokens around it
                raise PromptTooLong(
                    f"the prompt has over {found} tokens; prompt and answer together may have "
                    f"{self.most_tokens} (max_model_len, or the K/V memory). Shorten it.",
                    field="prompt",
                )
        return list(self.tokenizer.encode(text, **options))


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
