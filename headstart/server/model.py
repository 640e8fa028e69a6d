"""The served model as the server uses it beside the engine: tokenizer, formats, grammars, names."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from headstart import __version__
from headstart.engine.engine import Engine
from headstart.errors import ConfigError, RequestError
from headstart.server.grammars.compiler import GrammarCompiler
from headstart.server.grammars.specs import GrammarSpec, regex
from headstart.server.grammars.token_grammar import TokenGrammar
from headstart.server.options import ServerOptions, read_template
from headstart.server.pieces import Pieces, special_ids
from headstart.server.reasoning import Start, reasoning_format
from headstart.server.refusals import about
from headstart.server.templates.client import TemplateProcess
from headstart.server.tools.described import USUAL, has_place
from headstart.server.tools.formats import tool_format

_TAIL_TOKENS = 32  # of a prompt, which may open or close a block of thinking


class ServedModel:
    """Tokenizer, formats and grammars of one model; made in the engine's thread, used in others."""

    def __init__(self, engine: Engine, names: Sequence[str], root: str, options: ServerOptions):
        self.engine, self.names, self.root = engine, names, root
        self.created = int(time.time())
        self.max_len = engine.admission.longest
        self.fingerprint = f"headstart-{__version__}"
        self.tokenizer: Any = engine.prompts.tokenizer
        if options.chat_template is not None:
            if self.tokenizer is None:
                raise ConfigError("--chat-template needs a tokenizer and the checkpoint has none.")
            self.tokenizer.chat_template = read_template(options.chat_template)
        self.chat_template: str | None = getattr(self.tokenizer, "chat_template", None)
        self.tool_format = tool_format(options.tool_call_parser, self.chat_template)
        is_unknown = self.tool_format is None and options.tool_call_parser != "none"
        if is_unknown and self.chat_template and not has_place(self.chat_template):
            self.tool_format = USUAL
        kind = engine.model.checkpoint.config.model_type
        added = self.tokenizer.get_added_vocab() if self.tokenizer is not None else {}
        self.reasoning_format = reasoning_format(
            options.reasoning_parser, self.chat_template, kind, added
        )
        self._limits = options
        self.templates: TemplateProcess | None = None
        if self.chat_template:
            self.templates = TemplateProcess(
                self.tokenizer, max_seconds=options.max_template_seconds
            )
            engine.prompts.render = self.templates.render
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None

    @cached_property
    def thinks_in_special(self) -> bool:
        """Whether special tokens must stay in texts: marks of thinking are among them."""
        markers = self.reasoning_format.markers if self.reasoning_format is not None else ()
        return bool(set(markers) & set(self._special.values()))

    @cached_property
    def plain_special(self) -> dict[int, str]:
        """Special tokens that are no markers, and their texts."""
        return {i: text for i, text in self._special.items() if text not in self._markers}

    @cached_property
    def _special(self) -> dict[int, str]:
        if self.tokenizer is None:
            return {}
        return {i: self.tokenizer.convert_ids_to_tokens(i) for i in special_ids(self.tokenizer)}

    @property
    def _markers(self) -> list[str]:
        formats = (self.tool_format, self.reasoning_format)
        return [mark for known in formats if known is not None for mark in known.markers]

    def reasoning_start(self, ids: Sequence[int]) -> Start:
        """Where an answer to this prompt begins: inside, behind, or before the reasoning."""
        if self.reasoning_format is None:
            return "closed"
        return self.reasoning_format.start_in(self.decode(ids[-_TAIL_TOKENS:]))

    def num_reasoning_tokens(self, ids: Sequence[int], start: Start) -> int:
        """How many tokens of an answer are thinking, its marks included."""
        if self.reasoning_format is None or start == "closed":
            return 0
        begin, end = self.reasoning_format.markers
        if start == "free" and not self.decode(ids[:_TAIL_TOKENS]).lstrip().startswith(begin):
            return 0
        mark = self.tokenizer.backend_tokenizer.token_to_id(end)
        if mark is not None:
            at = ids.index(mark) if mark in ids else len(ids)
        else:  # several tokens: the shortest part of the answer that has them
            at = bisect_left(range(len(ids)), True, key=lambda i: end in self.decode(ids[: i + 1]))
        return min(at + 1, len(ids))

    def compile(self, spec: GrammarSpec) -> TokenGrammar:
        """May take seconds; RequestError for what cannot be compiled."""
        with about(spec.field):
            return self._get_compiler().compile(spec)

    def is_compiled(self, spec: GrammarSpec) -> bool:
        """Whether `compile` gives it at once."""
        return self._compiler is not None and self._compiler.is_kept(spec)

    def warm_up(self) -> None:
        """Start what compiles grammars, and wait until it has compiled one."""
        if self.tokenizer is not None:
            self._get_compiler().compile(regex("a*"))

    def close(self) -> None:
        self.close_templates()
        self.engine.prompts.render = self.engine.prompts.render_here
        with self._lock:
            if self._compiler is not None:
                self._compiler.close()

    def close_templates(self) -> None:
        """End what renders; requests that wait for it are refused."""
        if self.templates is not None:
            self.templates.close()

    def _get_compiler(self) -> GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                self._compiler = self._new_compiler()
            return self._compiler

    def _new_compiler(self) -> GrammarCompiler:
        if self.tokenizer is None:
            raise RequestError("grammars need a tokenizer and the checkpoint has none.")
        return GrammarCompiler(
            self.tokenizer, self.engine.model.config.vocab, end_ids=self.engine.prompts.end_ids,
            markers=self._markers,
            max_bytes=self._limits.max_grammar_bytes, max_seconds=self._limits.max_grammar_seconds,
        )  # fmt: skip

    @cached_property
    def pieces(self) -> Pieces:
        if self.tokenizer is None:
            raise RequestError(
                "log-probabilities need a tokenizer and the checkpoint has none.", field="logprobs"
            )
        return Pieces(self.tokenizer)

    def decode(self, ids: Sequence[int]) -> str:
        if self.tokenizer is None:
            raise RequestError("text needs a tokenizer and the checkpoint has none.")
        return self.engine.prompts.decode(ids)

    def tokenizer_info(self) -> dict[str, Any]:
        """What GET /tokenizer_info says."""
        if self.tokenizer is None:
            raise RequestError("the checkpoint has no tokenizer.")
        special = {name: str(text) for name, text in self.tokenizer.special_tokens_map.items()}
        return {
            "tokenizer_class": type(self.tokenizer).__name__, **special,
            "chat_template": self.chat_template, "model_max_length": self.max_len,
            "vocab_size": self.engine.model.config.vocab,
        }  # fmt: skip

    def cards(self) -> list[dict[str, Any]]:
        """Entries of GET /v1/models."""
        return [
            {
                "id": name, "object": "model", "created": self.created, "owned_by": "headstart",
                "root": self.root, "parent": None, "max_model_len": self.max_len,
            }
            for name in self.names
        ]  # fmt: skip
