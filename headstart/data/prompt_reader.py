"""Between text and tokens: prompts as people give them, a model's own defaults, and answers.

A prompt is text, token ids or chat messages. An answer's tokens become text while they arrive: a
token may end in the middle of a character, and several may arrive at once, so text is handed out
only as far as it cannot change any more and cannot become part of a stop string.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from headstart.checkpoint.reader import Checkpoint
from headstart.errors import (
    PromptTooLong,
    RequestError,
    library_fault,
    raise_fault,
    some,
    tokenizer_failed,
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


_BROKEN = "\ufffd"  # what decoders put for bytes that are not yet a character


class Decoder(Protocol):
    """What turns tokens into text: a tokenizer of transformers or tokenizers."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


def _decoder(tokenizer: Decoder) -> Callable[..., str]:
    """The tokenizer's `decode`, or what it calls: every token of every answer goes this way."""
    inner: Decoder | None = getattr(tokenizer, "backend_tokenizer", None)
    is_plain = inner is not None and not getattr(tokenizer, "clean_up_tokenization_spaces", False)
    return inner.decode if inner is not None and is_plain else tokenizer.decode


def _no_text(tokens: list[int], *, skip_special_tokens: bool) -> str:
    return ""


class Detokenizer:
    """The text of one growing sequence."""

    def __init__(
        self,
        tokenizer: Decoder,
        stops: Sequence[str],
        *,
        skip_special: bool,
        keep_stop: bool,
        min_tokens: int = 0,
    ):
        self._decoded, self._stops = _decoder(tokenizer), tuple(stops)
        self._skip_special, self._keep_stop = skip_special, keep_stop
        self._min_tokens = min_tokens  # no stop string ends before the token after these
        self._tokens: list[int] = []
        self._prefix = 0  # decoding starts here, so that a word keeps its leading space
        self._read = 0
        self.text = ""
        self.error: str | None = None  # why decoding ended; the text until then stays
        self._given = 0

    def add(self, token: int) -> str | None:
        """Take one token; returns the stop string that is now complete, if any."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._prefix : self._read])
        after = self._decode(self._tokens[self._prefix :])
        if after.endswith(_BROKEN) or len(after) <= len(before):
            return None
        self._prefix, self._read = self._read, len(self._tokens)
        scanned = len(self.text)
        self.text += after[len(before) :]
        return self._find_stop(scanned) if len(self._tokens) > self._min_tokens else None

    def finish(self) -> None:
        """No more tokens: what is still held back is text as it is."""
        before = self._decode(self._tokens[self._prefix : self._read])
        self.text += self._decode(self._tokens[self._prefix :])[len(before) :]
        self._prefix = self._read = len(self._tokens)

    def take(self, *, is_last: bool) -> str:
        """The part of the text that is safe to show and was not shown yet."""
        end = len(self.text) if is_last else len(self.text) - self._held_back()
        part = self.text[self._given : max(end, self._given)]
        self._given += len(part)
        return part

    def _decode(self, tokens: list[int]) -> str:
        try:
            return str(self._decoded(tokens, skip_special_tokens=self._skip_special))
        except BaseException as error:
            fault = library_fault(error)
            if fault is None:
                raise
            self.error = tokenizer_failed(_MODEL, fault)
            self._decoded = _no_text  # the tokens behind this one would fail as well
            return ""

    def _find_stop(self, scanned: int) -> str | None:
        """The stop string that completes first; the text is cut there."""
        found = [
            (at + len(stop), at, stop)
            for stop in self._stops
            if (at := self.text.find(stop, max(0, scanned - len(stop) + 1))) >= 0
        ]
        if not found:
            return None
        end, at, stop = min(found)
        self.text = self.text[: end if self._keep_stop else at]
        return stop

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = 0
        for stop in self._stops:
            tail = self.text[-(len(stop) - 1) :] if len(stop) > 1 else ""
            at = tail.find(stop[0])
            while 0 <= at < len(tail) - longest:
                if stop.startswith(tail[at:]):
                    longest = len(tail) - at
                    break
                at = tail.find(stop[0], at + 1)
        return longest
