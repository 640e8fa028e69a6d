"""A real tokenizer for a made checkpoint: its files, and which of its tokens the trunk may write.

The trunk walks a cycle over tokens. Special and added tokens stay off it, because they end an
answer or are no text, and so do parts of characters: every text on the cycle is then one that a
grammar can permit (`ANY_TEXT`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from headstart.checkpoint.config import read_json_object
from headstart.errors import BrokenFile, ConfigError, tokenizer_faults
from headstart.files import read_plain

ANY_TEXT = r"(.|\n)*"  # a regular expression that permits whatever the trunk writes

_TEMPLATE = "chat_template.jinja"
_JSON_FILES = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
# Servers refuse tools where the template has no place for them; these are the marks of Hermes.
_TOOLS = "{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>\n{% endif %}"
_PLAIN_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True)
class GivenTokenizer:
    """The files of a tokenizer by name: texts as they are, JSON as objects."""

    name: str  # for messages
    files: Mapping[str, Any]

    @cached_property
    def _own(self) -> Any:
        from tokenizers import Tokenizer

        with tokenizer_faults(self.name, BrokenFile):  # the library raises nothing more specific
            return Tokenizer.from_str(self.files["tokenizer.json"])

    @cached_property
    def num_ids(self) -> int:
        """One more than the largest id."""
        return 1 + max(self._own.get_vocab().values(), default=-1)

    @cached_property
    def end_ids(self) -> list[int]:
        """Tokens that end an answer, from generation_config.json or by name."""
        found = self.files.get("generation_config.json", {}).get("eos_token_id")
        if found is None:
            found = self._role_ids.get("eos_token")
        ends = found if isinstance(found, list) else [found]
        if not ends or not all(isinstance(i, int) and 0 <= i < self.num_ids for i in ends):
            raise ConfigError(
                f"the tokenizer of {self.name} has the end token {found!r}; expected ids below "
                f"{self.num_ids}. Name one as eos_token in its tokenizer_config.json."
            )
        return ends

    @cached_property
    def left_out(self) -> list[int]:
        """Ids that the trunk never writes: added tokens, ends, parts of characters, gaps."""
        ids = range(self.num_ids)
        with tokenizer_faults(self.name, BrokenFile):
            texts = self._own.decode_batch([[i] for i in ids], skip_special_tokens=False)
        apart = {*self._own.get_added_tokens_decoder(), *self.end_ids, *self._role_ids.values()}
        return [i for i in ids if i in apart or not texts[i] or "\ufffd" in texts[i]]

    @property
    def ordinary(self) -> list[int]:
        """Ids that the cycle visits."""
        return ordinary_ids(self.num_ids, self.left_out)

    @cached_property
    def _role_ids(self) -> dict[str, int]:
        settings = {
            **self.files.get("special_tokens_map.json", {}),
            **self.files.get("tokenizer_config.json", {}),
        }
        named = {role: settings[role] for role in _ROLES if settings.get(role) is not None}
        ids = {role: self._own.token_to_id(self._token(role, v)) for role, v in named.items()}
        return {role: i for role, i in ids.items() if i is not None}

    def _token(self, role: str, value: Any) -> str:
        """A token as tokenizer_config.json has it: its text, or an object with it."""
        text = value.get("content") if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise BrokenFile(
                f"the tokenizer of {self.name} has the {role} {value!r}; expected its text, or an "
                'object with "content". Give another --tokenizer.'
            )
        return text

    def config_with_ids(self, config: dict[str, Any]) -> dict[str, Any]:
        """The config with this tokenizer's first and last tokens instead of its own."""
        ends = self.end_ids
        kept = {name: value for name, value in config.items() if name != "bos_token_id"}
        bos = self._role_ids.get("bos_token")
        own = {} if bos is None else {"bos_token_id": bos}
        return {**kept, **own, "eos_token_id": ends[0] if len(ends) == 1 else ends}

    def documents(self, max_len: int) -> dict[str, Any]:
        """What is written beside the weights, in a form that needs no code of the tokenizer's."""
        settings = dict(self.files.get("tokenizer_config.json", {}))
        template = self.files.get(_TEMPLATE) or _text_of(settings.pop("chat_template", None))
        for name in ("auto_map", "chat_template", "processor_class"):
            settings.pop(name, None)
        settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_len}
        template = template or _PLAIN_TEMPLATE
        documents = {
            "tokenizer.json": self.files["tokenizer.json"],
            "tokenizer_config.json": settings,
            _TEMPLATE: template if "tools" in template else _TOOLS + template,
        }
        if "special_tokens_map.json" in self.files:
            documents["special_tokens_map.json"] = self.files["special_tokens_map.json"]
        return documents


def ordinary_ids(num_ids: int, left_out: list[int]) -> list[int]:
    """The ids below `num_ids` that are not left out, in order."""
    return sorted(set(range(num_ids)) - set(left_out))


def read_tokenizer(folder: Path) -> GivenTokenizer:
    """The tokenizer of a checkpoint's folder; ConfigError where there is none."""
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"--tokenizer: {folder} has no tokenizer.json. Give a folder that has one, or demo."
        )
    files: dict[str, Any] = {"tokenizer.json": _text_in(folder / "tokenizer.json")}
    for name in _JSON_FILES:
        if (folder / name).is_file():
            files[name] = read_json_object(folder / name)
    if (folder / _TEMPLATE).is_file():
        files[_TEMPLATE] = _text_in(folder / _TEMPLATE)
    return GivenTokenizer(str(folder), files)


def _text_in(path: Path) -> str:
    try:
        return read_plain(path).decode("utf-8")
    except ValueError as error:
        raise BrokenFile(f"{path} is not text ({error}). Give another --tokenizer.") from error


def _text_of(template: Any) -> str | None:
    """A template as tokenizer_config.json has it: a text, or several by name."""
    if isinstance(template, list):
        named = {p.get("name"): p.get("template") for p in template if isinstance(p, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
