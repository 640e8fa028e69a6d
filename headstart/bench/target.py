"""A server to be measured, and the bodies of the requests it gets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headstart.bench.workload import Question, Workload
from headstart.data.api_keys import API_KEY_VARIABLE, key_from_environment
from headstart.data.conversations import Conversation
from headstart.errors import ConfigError

# Fields that a server may not know. It is asked once with all of them; those it refuses are left
# out for good. The first ones say how many tokens a chunk holds, `headstart` what drafting gave.
OPTIONAL_FIELDS = ("return_token_ids", "stream_options", "headstart", "ignore_eos", "seed")


@dataclass(frozen=True, kw_only=True)
class Target:
    """One server under one name; `fields` go into every body as they are."""

    url: str
    model: str | None = None  # None: the first that it lists
    api_key: str | None = field(default=None, repr=False)  # None: $HEADSTART_API_KEY
    fields: Mapping[str, Any] = field(default_factory=dict)
    timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"url is {self.url!r}; give one such as http://host:8000.")
        if self.timeout_seconds <= 0:
            raise ConfigError(f"timeout_seconds is {self.timeout_seconds}; give more than 0.")

    @property
    def root(self) -> str:
        """Where /metrics is."""
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def key(self) -> str | None:
        return self.api_key or key_from_environment()


def refusal_words(url: str, status: int | None, words: str) -> str:
    """One line about a refusal: what the server said, and what to do where that is known."""
    hint = "See the server's message, and its log."
    if status in (401, 403):
        hint = f"Put the key into {API_KEY_VARIABLE}, or name its variable with --api-key-env."
    elif status == 404:
        hint = "Check the URL, --api and --served-model."
    elif status is None:
        hint = "Check the URL, and that the server is up."
    shown = "" if status is None else f" with status {status}"
    return f"{url} refuses{shown}: {words.rstrip('. ') or 'nothing more was said'}. {hint}"


class Bodies:
    """Makes request bodies for one target and workload."""

    def __init__(self, target: Target, workload: Workload):
        self._target, self._workload = target, workload
        self.model = target.model
        self.left_out: set[str] = set()

    def body(self, question: Question, answers: Sequence[str] = ()) -> bytes:
        """Of the turn that comes after these answers."""
        workload = self._workload
        optional: dict[str, Any] = {
            "return_token_ids": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "headstart": {"statistics": True},
            "seed": question.seed,
        }
        if workload.ignore_eos:
            optional["ignore_eos"] = True
        if "continuous_usage_stats" in self.left_out:
            optional["stream_options"] = {"include_usage": True}
        fields: dict[str, Any] = {
            "model": self.model,
            **_prompt(question, answers),
            "max_tokens": question.max_tokens[len(answers)],
            "temperature": workload.temperature,
            "stream": True,
            **{name: optional[name] for name in optional if name not in self.left_out},
        }
        return json.dumps(_merged(fields, self._target.fields)).encode()


def _prompt(question: Question, answers: Sequence[str]) -> dict[str, Any]:
    if isinstance(question.prompt, Conversation):
        return {"messages": question.prompt.next_messages(answers)}
    return {"prompt": question.prompt}


def _merged(fields: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`more` wins; objects are merged, so that {"headstart": {"speculate": 3}} adds to ours."""
    result = dict(fields)
    for name, value in more.items():
        if isinstance(value, Mapping) and isinstance(result.get(name), Mapping):
            result[name] = {**result[name], **value}
        else:
            result[name] = value
    return result
