"""What an engine can be told, in one frozen dataclass that is also its command-line flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from headstart.errors import ConfigError

Speculate = int | Literal["auto"]
MAX_DRAFTS = 16


def parse_speculate(text: str) -> Speculate:
    """`auto` or a number, as people type it."""
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"speculate is {text!r}; give auto or a number from 0 to {MAX_DRAFTS}."
        ) from None


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Sizes, limits and switches; "auto" values are resolved when the engine starts."""

    speculate: Speculate = field(
        default=3,
        metadata={
            "help": "draft tokens per round: a number, 0 for none, or auto",
            "parser": parse_speculate,
        },
    )
    speculate_off_above: int | None = field(
        default=None, metadata={"help": "no drafting while more than this many requests run"}
    )
    device: str = field(default="auto", metadata={"help": "cpu, cuda, or auto"})
    dtype: str = field(
        default="auto", metadata={"help": "float32, bfloat16, float64, or auto by device"}
    )
    weights: Literal["as-dtype", "int8"] = field(
        default="as-dtype", metadata={"help": "int8: 8-bit weights with one scale per row (CPU)"}
    )
    block_size: int = field(default=16, metadata={"help": "tokens per K/V block"})
    kv_bytes: int | None = field(
        default=None, metadata={"help": "memory for K/V in bytes; default: by memory fraction"}
    )
    memory_fraction: float = field(default=0.5, metadata={"help": "share of free memory for K/V"})
    max_running_requests: int = field(default=64, metadata={"help": "requests in one batch"})
    max_batched_tokens: int = field(default=2048, metadata={"help": "rows in one trunk pass"})
    max_model_len: int | None = field(
        default=None, metadata={"help": "longest prompt plus answer; default: the model's own"}
    )
    prefix_caching: bool = field(default=True, metadata={"help": "reuse blocks of equal prefixes"})
    chunked_prefill: bool = field(
        default=True, metadata={"help": "cut long prompts so that running requests go on"}
    )
    threads: int | None = field(default=None, metadata={"help": "CPU threads; default: all cores"})
    layout: Literal["own", "vllm", "sglang"] = field(
        default="own", metadata={"help": "run the head as this engine does, to compare counters"}
    )

    def __post_init__(self) -> None:
        if self.speculate != "auto" and not 0 <= self.speculate <= MAX_DRAFTS:
            raise ConfigError(
                f"speculate is {self.speculate!r}; give auto or a number from 0 to {MAX_DRAFTS}."
            )
        for name in ("block_size", "max_running_requests", "max_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give at least 1.")
        if not 0 < self.memory_fraction <= 1:
            raise ConfigError(f"memory_fraction is {self.memory_fraction}; give a value in (0, 1].")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"max_model_len is {self.max_model_len}; give at least 2.")

    @property
    def max_drafts(self) -> int:
        """The most draft tokens a round may have."""
        return 8 if self.speculate == "auto" else self.speculate
