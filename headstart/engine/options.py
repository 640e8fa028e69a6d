"""The options of an engine, in one frozen dataclass that is also its command-line flags."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Literal, TypedDict

from headstart.backends.options import BackendOptions, KvDtype, Weights
from headstart.copying.drafts import MAX_COPIED
from headstart.errors import ConfigError, some
from headstart.vocab.own_tokens import check_limit

Speculate = int | Literal["auto", "context"]
MAX_DRAFTS = MAX_COPIED
MENU = (0, 1, 2, 3, 5, 8)  # numbers of drafts that `auto` chooses among and times
VERIFIED = (*MENU, 12, MAX_COPIED)  # and those whose verification is timed: some may be copied


def parse_speculate(text: str) -> Speculate:
    """`auto`, `context` or a number, as people type it."""
    if text == "auto":
        return "auto"
    if text == "context":
        return "context"
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"speculate is {text!r}; give auto, context or a number from 0 to {MAX_DRAFTS}.",
            field="speculate",
        ) from None


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Sizes, limits and switches; "auto" values are resolved when the engine starts."""

    speculate: Speculate = field(
        default=3,
        metadata={
            "help": "draft tokens per round: a number, 0 for none, auto, or context (copied only)",
            "parser": parse_speculate,
        },
    )
    speculate_off_above: int | None = field(
        default=None, metadata={"help": "no drafting while more than this many requests run"}
    )
    draft_from_answers: int = field(
        default=0,
        metadata={"help": "let auto and context copy from so many other answers, too"},
    )
    draft_vocab: str | None = field(
        default=None,
        metadata={"help": "file of draft vocabularies; with several, one is chosen by language"},
    )
    draft_vocab_own: int = field(
        default=0,
        metadata={
            "help": "tokens of its own text that a request may draft beside its draft vocabulary: "
            "the last ones outside it; 0 for none"
        },
    )
    device: str = field(default="auto", metadata={"help": "cpu, cuda, or auto"})
    dtype: str = field(
        default="auto",
        metadata={"help": "float32, bfloat16, float64, float16 (GPU), or auto by device"},
    )
    weights: Weights = field(
        default="as-dtype",
        metadata={"help": "rounded weights: int8 or int4, in groups of 32 (CPU), or fp8 (GPU)"},
    )
    draft_weights: Literal["auto", "as-dtype", "int8"] = field(
        default="auto",
        metadata={
            "help": "of head and LM head while they draft; int8 reads half the bytes; auto: GPU"
        },
    )
    kv_dtype: KvDtype = field(
        default="as-dtype",
        metadata={"help": "of keys and values: fp8 holds twice the tokens (on a CPU only rounds)"},
    )
    block_size: int = field(default=16, metadata={"help": "tokens per K/V block"})
    kv_bytes: int | None = field(
        default=None, metadata={"help": "memory for K/V in bytes; default: by memory fraction"}
    )
    memory_fraction: float | None = field(
        default=None,
        metadata={
            "help": "of a GPU's whole memory, for everything, weights included (default 0.9); "
            "on a CPU of free memory, for K/V (default: up to 1 GiB)"
        },
    )
    max_running_requests: int | None = field(
        default=None,
        metadata={"help": "requests in one batch; default: CPU 64, GPU by memory, up to 256"},
    )
    max_batched_tokens: int | None = field(
        default=None,
        metadata={"help": "rows in one trunk pass; default: CPU 512 or more, GPU 8192"},
    )
    max_model_len: int | None = field(
        default=None, metadata={"help": "longest prompt plus answer; default: the model's own"}
    )
    prefix_caching: bool = field(default=True, metadata={"help": "reuse blocks of equal prefixes"})
    chunked_prefill: bool = field(
        default=True, metadata={"help": "cut long prompts so that running requests go on"}
    )
    threads: int | None = field(
        default=None, metadata={"help": "CPU threads of this process; default: measured at start"}
    )
    exact: bool = field(
        default=False,
        metadata={"help": "text does not depend on how rows are batched, to the bit (slower)"},
    )
    kernels: Literal["auto", "on", "off"] = field(
        default="auto",
        metadata={
            "help": "fused on a GPU (captured rounds, too), compiled on a CPU; auto: where they fit"
        },
    )
    layout: Literal["own", "vllm", "sglang"] = field(
        default="own", metadata={"help": "run the head as this engine does, to compare counters"}
    )

    def __post_init__(self) -> None:
        if not is_speculate(self.speculate):
            raise ConfigError(
                f"speculate is {self.speculate!r}; give auto, context or a number from 0 to "
                f"{MAX_DRAFTS}.",
                field="speculate",
            )
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if type(value) is not int or value < least:
                raise ConfigError(
                    f"{name} is {value!r}; give a whole number of at least {least}.", field=name
                )
        if self.draft_vocab_own != 0:
            check_limit(self.draft_vocab_own)
        for name in _SWITCHES:
            if type(getattr(self, name)) is not bool:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}; give true or false.", field=name
                )
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}; give one of {', '.join(choices)}.",
                    field=name,
                )
        if self.draft_from_answers and not self.is_automatic:
            raise ConfigError(
                f"draft_from_answers is {self.draft_from_answers} and speculate is "
                f"{self.speculate}; only auto and context copy from answers. Give one of them.",
                field="draft_from_answers",
            )
        share = self.memory_fraction
        if share is not None and not (type(share) in (int, float) and 0 < share <= 1):
            raise ConfigError(
                f"memory_fraction is {share!r}; give a number above 0, up to 1.",
                field="memory_fraction",
            )
        if self.exact and self.weights != "as-dtype":
            raise ConfigError(
                f"exact and weights {self.weights} were both given; the arithmetic of "
                f"{self.weights} products depends on the number of rows. Leave one of them out."
            )
        if self.weights == "fp8" and self.kernels == "off":
            raise ConfigError(
                "weights fp8 and kernels off were both given; only the kernels read 8-bit floats. "
                "Leave one of them out."
            )

    @property
    def num_rows(self) -> int:
        """Rows in one trunk pass; without a limit of its own, that of a CPU."""
        if self.max_batched_tokens is not None:
            return self.max_batched_tokens
        if not self.chunked_prefill:
            return _CPU_WHOLE_ROWS
        return max(_CPU_ROWS, 2 * self.num_requests * (self.usual_drafts + 1))

    @property
    def num_requests(self) -> int:
        """Requests in one batch; without a limit of its own, that of a CPU."""
        return self.max_running_requests or _CPU_REQUESTS

    def resolved(self, device: str) -> EngineOptions:
        """The same with defaults that depend on the device.

        How many requests run on a GPU is left to `resolved_requests` in `engine/memory.py`.
        """
        if device != "cuda":
            return replace(self, max_running_requests=self.num_requests)
        return replace(self, max_batched_tokens=self.max_batched_tokens or _GPU_ROWS)

    @property
    def backend(self) -> BackendOptions:
        """The part that a backend is chosen and made by."""
        return BackendOptions(
            weights=self.weights, draft_weights=self.draft_weights, kv_dtype=self.kv_dtype,
            kernels=self.kernels, exact=self.exact, threads=self.threads,
        )  # fmt: skip

    @property
    def max_drafts(self) -> int:
        """The most tokens that a round drafts of a request, by the head where one runs."""
        return MENU[-1] if self.speculate == "auto" else self.max_copied

    @property
    def max_copied(self) -> int:
        """The most tokens that a round copies of a request."""
        return MAX_COPIED if isinstance(self.speculate, str) else self.speculate

    @property
    def runs_head(self) -> bool:
        """Whether a head is wanted at all."""
        return self.speculate not in (0, "context")

    @property
    def is_automatic(self) -> bool:
        """Whether the number of drafts goes by what rounds cost and bring."""
        return self.speculate in ("auto", "context")

    @property
    def usual_drafts(self) -> int:
        """Draft tokens per round that limits are planned for; `auto` may choose more."""
        if self.speculate == "auto" or self.speculate == "context":
            return _AUTO_DRAFTS
        return self.speculate


# In one trunk pass: enough for the products to be efficient, and no more where a pass takes long,
# since running answers wait for it. Of many answers half of the rows are for prompts.
_CPU_ROWS, _GPU_ROWS = 512, 8192
_CPU_REQUESTS = 64
_CPU_WHOLE_ROWS = 2048  # where prompts are not cut: longer ones wait until no other request runs
_AUTO_DRAFTS = 3  # usual where `auto` decides
_LEAST = {
    "block_size": 1, "max_running_requests": 1, "max_batched_tokens": 1, "max_model_len": 2,
    "kv_bytes": 1, "threads": 1, "speculate_off_above": 0, "draft_from_answers": 0,
}  # fmt: skip
_OPTIONAL = (
    "max_model_len", "kv_bytes", "threads", "speculate_off_above", "max_batched_tokens",
    "max_running_requests",
)  # fmt: skip
_SWITCHES = ("prefix_caching", "chunked_prefill", "exact")
_CHOICES = {
    "weights": ("as-dtype", "int8", "int4", "fp8"), "layout": ("own", "vllm", "sglang"),
    "kernels": ("auto", "on", "off"), "draft_weights": ("auto", "as-dtype", "int8"),
    "kv_dtype": ("as-dtype", "fp8"),
}  # fmt: skip


def is_speculate(value: Speculate | None) -> bool:
    """Whether an engine can draft so: `auto`, `context`, or 0 to MAX_DRAFTS tokens."""
    return value in ("auto", "context") or (type(value) is int and 0 <= value <= MAX_DRAFTS)


class EngineSettings(TypedDict, total=False):
    """The fields of `EngineOptions` as keywords of `Engine`, which has `draft_vocab` of its own."""

    speculate: Speculate
    speculate_off_above: int | None
    draft_from_answers: int
    draft_vocab_own: int
    device: str
    dtype: str
    weights: Weights
    draft_weights: Literal["auto", "as-dtype", "int8"]
    kv_dtype: KvDtype
    block_size: int
    kv_bytes: int | None
    memory_fraction: float | None
    max_running_requests: int | None
    max_batched_tokens: int | None
    max_model_len: int | None
    prefix_caching: bool
    chunked_prefill: bool
    threads: int | None
    exact: bool
    kernels: Literal["auto", "on", "off"]
    layout: Literal["own", "vllm", "sglang"]


def engine_options(options: EngineOptions | None, settings: EngineSettings) -> EngineOptions:
    """What a constructor was given: a dataclass, or its fields by name, never both."""
    if options is not None and settings:
        raise ConfigError(
            f"options and {some(settings)} were both given; put all settings into EngineOptions."
        )
    known = [field.name for field in fields(EngineOptions)]
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise ConfigError(f"the engine has no option {some(unknown)}; it has {', '.join(known)}.")
    return options if options is not None else EngineOptions(**settings)
