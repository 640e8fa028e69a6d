"""The options of `headstart distill`, in one frozen dataclass that is also its flags."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from headstart.data.api_keys import API_KEY_VARIABLE, key_from_environment
from headstart.errors import ConfigError
from headstart.sampling.params import SamplingParams


def parse_object(text: str) -> dict[str, Any]:
    """A JSON object, as people type it."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(
            f"chat_template_kwargs is {text!r}; give a JSON object such as "
            "'{\"enable_thinking\": false}'."
        )
    return value


@dataclass(frozen=True, kw_only=True)
class DistillOptions:
    """How prompts are answered, which answers are kept, and what is held out."""

    samples: int = field(default=1, metadata={"help": "answers to each prompt"})
    seed: int = field(default=0, metadata={"help": "same seed, same answers (embedded engine)"})
    temperature: float = field(default=0.6, metadata={"help": "0 takes the most likely token"})
    top_k: int = field(default=20, metadata={"help": "choose among so many tokens; 0: all"})
    top_p: float = field(default=0.95, metadata={"help": "choose among tokens with this share"})
    max_tokens: int = field(default=4096, metadata={"help": "longest answer"})
    limit: int | None = field(default=None, metadata={"help": "only the first so many prompts"})
    chat_template_kwargs: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "JSON object for the chat template", "parser": parse_object},
    )
    heldout: float = field(default=0.05, metadata={"help": "share of prompts kept for scoring"})
    min_answer_tokens: int = field(default=2, metadata={"help": "drop shorter answers"})
    max_repetition: float = field(
        default=0.5,
        metadata={"help": "drop answers with a larger share of repeated 8-grams; 1: keep loops"},
    )
    max_similarity: float = field(
        default=0.8, metadata={"help": "drop answers this similar to another one; 1: only copies"}
    )
    keep_truncated: bool = field(
        default=False,
        metadata={"help": "keep answers that were cut off at --max-tokens (dropped otherwise)"},
    )
    server: str | None = field(
        default=None, metadata={"help": "ask this OpenAI-compatible server instead"}
    )
    server_model: str | None = field(
        default=None, metadata={"help": "the model's name there; default: the first it lists"}
    )
    api_key: str | None = field(
        default=None, metadata={"help": f"for the server; default: ${API_KEY_VARIABLE}"}
    )
    concurrency: int = field(default=64, metadata={"help": "questions open at the server at once"})
    retries: int = field(default=6, metadata={"help": "tries after a failed one, ever later"})
    timeout_seconds: float = field(default=600.0, metadata={"help": "wait for one answer"})

    def __post_init__(self) -> None:
        for name, low in (("samples", 1), ("limit", 1), ("concurrency", 1), ("retries", 0),
                          ("min_answer_tokens", 0), ("max_tokens", 1)):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"{name} is {value}; give at least {low}.")
        for name in ("heldout", "max_repetition", "max_similarity"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a value from 0 to 1.")
        if self.timeout_seconds <= 0:
            raise ConfigError(f"timeout_seconds is {self.timeout_seconds}; give more than 0.")
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"seed is {self.seed}; give a number from 0 to 2^63 - 1.")
        if self.server is not None and not self.server.startswith(("http://", "https://")):
            raise ConfigError(f"server is {self.server!r}; give a URL such as http://host:8000.")
        SamplingParams(**self.sampling)  # refuses what no sampler can do, before a model is loaded

    @property
    def sampling(self) -> dict[str, Any]:
        """What decides the text besides the seed, as it is recorded."""
        names = ("temperature", "top_k", "top_p", "max_tokens")
        return {name: getattr(self, name) for name in names}

    @property
    def key(self) -> str | None:
        return self.api_key or key_from_environment()
