"""What a user may ask of a launch, in words that are the same for every engine.

Values are checked here for sense; whether an engine can do it is the adapter's business. None, ""
and False mean: not asked for, leave it to the engine.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from headstart.errors import ConfigError

_SWITCH = ("", "on", "off")
_ROLES = ("", "prefill", "decode")
_POSITIVE = (
    "tensor_parallel", "data_parallel", "expert_parallel", "pipeline_parallel", "num_nodes",
    "draft_top_k", "max_running_requests", "max_model_len", "max_batched_tokens",
    "cuda_graph_batch", "speculate_off_above",
)  # fmt: skip
LAST_PORT = 65535
# Options that only say how to draft.
_DRAFTING = (
    "head", "draft_model", "draft_vocab", "token_map", "collect", "speculate_off_above",
    "schedule", "adaptive",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    speculate: int | None = field(
        default=None,
        metadata={
            "help": "K, draft tokens per round; 0 = no drafting; default: advice for the family"
        },
    )
    head: Path | None = field(
        default=None, metadata={"help": "a separate head checkpoint instead of the model's own"}
    )
    draft_model: Path | None = field(default=None, metadata={"help": "the same as --head"})
    draft_top_k: int = field(default=1, metadata={"help": "branches per draft position"})
    draft_vocab: Path | None = field(
        default=None,
        metadata={"help": "draft vocabulary: the tokens that may be proposed (`headstart vocab`)"},
    )
    token_map: Path | None = field(default=None, metadata={"help": "the same as --draft-vocab"})
    collect: Path | None = field(
        default=None,
        metadata={"help": "vLLM: folder for its answers with the trunk's states, to train on"},
    )
    speculate_off_above: int | None = field(
        default=None, metadata={"help": "no drafting while more than this many requests run"}
    )
    schedule: str = field(
        default="",
        metadata={
            "help": "K by running requests, as `1:3,9:1,33:0` (from 1: K=3, from 9: K=1, ...)"
        },
    )
    adaptive: bool = field(
        default=False, metadata={"help": "let the engine choose K by what is accepted"}
    )
    tensor_parallel: int = field(default=1, metadata={"help": "devices that share every layer"})
    data_parallel: int = field(
        default=1, metadata={"help": "replicas of the attention part; devices = this x tensor"}
    )
    expert_parallel: int = field(default=1, metadata={"help": "devices that share the experts"})
    pipeline_parallel: int = field(
        default=1, metadata={"help": "devices that hold consecutive layers"}
    )
    num_nodes: int = field(default=1, metadata={"help": "machines"})
    node_rank: int = field(default=0, metadata={"help": "this machine's number, from 0"})
    master_addr: str = field(
        default="", metadata={"help": "HOST:PORT of machine 0, when there are several"}
    )
    host: str = field(
        default="127.0.0.1",
        metadata={"help": "address to listen on; 0.0.0.0 to be reached from outside"},
    )
    port: int = field(
        default=8000, metadata={"help": "port to listen on; xLLM takes one per device from here up"}
    )
    device: str = field(
        default="", metadata={"help": "cuda, npu, cpu, ...: where the engine has a choice"}
    )
    dtype: str = field(default="", metadata={"help": "dtype of weights and activations"})
    memory_fraction: float | None = field(
        default=None, metadata={"help": "share of device memory the engine may take"}
    )
    max_running_requests: int | None = field(
        default=None, metadata={"help": "requests in one batch"}
    )
    max_model_len: int | None = field(
        default=None, metadata={"help": "longest prompt and answer together, in tokens"}
    )
    max_batched_tokens: int | None = field(default=None, metadata={"help": "tokens in one batch"})
    cuda_graph_batch: int | None = field(
        default=None, metadata={"help": "largest number of requests captured in graphs"}
    )
    chunked_prefill: str = field(
        default="", metadata={"help": "on, off, or the chunk size in tokens"}
    )
    prefix_caching: str = field(default="", metadata={"help": "on or off"})
    kv_offload_gb: float | None = field(
        default=None, metadata={"help": "host memory for evicted KV blocks, whole server"}
    )
    disaggregation: str = field(
        default="", metadata={"help": "prefill or decode, when they run on separate servers"}
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "let the engine run Python code of the checkpoint"}
    )
    served_model_name: str = field(default="", metadata={"help": "name that clients use"})
    log_dir: Path | None = field(
        default=None, metadata={"help": "folder for logs, where there is one process per device"}
    )
    docker: bool = field(
        default=False,
        metadata={"help": "wrap the command in docker run, with the engine's own image"},
    )
    extra: str = field(
        default="", metadata={"help": "further arguments for the engine, quoted as one string"}
    )

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{_flag(name)} is {value}; expected 1 or more.")
        if not 1 <= self.port <= LAST_PORT:
            raise ConfigError(f"--port is {self.port}; expected 1 to {LAST_PORT}.")
        if self.speculate is not None and self.speculate < 0:
            raise ConfigError(f"--speculate is {self.speculate}; expected 0 (off) or more.")
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            raise ConfigError(
                f"--memory-fraction is {self.memory_fraction}; expected a number above 0, up to 1."
            )
        if self.kv_offload_gb is not None and self.kv_offload_gb <= 0:
            raise ConfigError(f"--kv-offload-gb is {self.kv_offload_gb}; expected more than 0.")
        self._check_words()
        self._check_nodes()
        self._check_drafting()

    def _check_words(self) -> None:
        if self.prefix_caching not in _SWITCH:
            raise ConfigError(f"--prefix-caching is {self.prefix_caching!r}; expected on or off.")
        size = self.chunked_prefill
        if size not in _SWITCH and not (size.isdigit() and int(size) > 0):
            raise ConfigError(f"--chunked-prefill is {size!r}; expected on, off or a size.")
        if self.disaggregation not in _ROLES:
            raise ConfigError(
                f"--disaggregation is {self.disaggregation!r}; expected prefill or decode."
            )
        if self.kv_offload_gb is not None and self.prefix_caching == "off":
            raise ConfigError(
                "--kv-offload-gb keeps evicted prefixes, and --prefix-caching is off; drop one."
            )
        try:
            shlex.split(self.extra)
        except ValueError as error:
            raise ConfigError(f"--extra cannot be split into arguments: {error}.") from None

    def _check_nodes(self) -> None:
        if not 0 <= self.node_rank < self.num_nodes:
            raise ConfigError(
                f"--node-rank is {self.node_rank} with --num-nodes {self.num_nodes}; expected 0 to "
                f"{self.num_nodes - 1}."
            )
        if self.master_addr and not re.fullmatch(r"\S+:\d+", self.master_addr):
            raise ConfigError(f"--master-addr is {self.master_addr!r}; expected HOST:PORT.")
        devices = self.tensor_parallel * self.data_parallel * self.pipeline_parallel
        if devices % self.num_nodes:
            raise ConfigError(
                f"{devices} devices cannot be spread evenly over {self.num_nodes} machines; change "
                "--num-nodes or the parallel sizes."
            )

    def _check_drafting(self) -> None:
        for one, other in (("head", "draft_model"), ("draft_vocab", "token_map")):
            given, again = getattr(self, one), getattr(self, other)
            if given and again and given != again:
                raise ConfigError(
                    f"--{_flag(one)} is {given} and --{_flag(other)} {again}: they are two names "
                    "of one option. Give one."
                )
        ways = [n for n in ("speculate_off_above", "schedule", "adaptive") if getattr(self, n)]
        if len(ways) > 1:
            raise ConfigError(
                f"--{_flag(ways[0])} and --{_flag(ways[1])} both choose K at run time; give one."
            )
        asked = [name for name in _DRAFTING if getattr(self, name)]
        if self.draft_top_k > 1:
            asked.append("draft_top_k")
        if self.speculate == 0 and asked:
            raise ConfigError(
                f"--speculate 0 turns drafting off, and --{_flag(asked[0])} says how to draft; "
                "drop one."
            )
        self.steps()

    @property
    def head_path(self) -> Path | None:
        return self.head or self.draft_model

    @property
    def vocab_path(self) -> Path | None:
        return self.draft_vocab or self.token_map

    @property
    def extra_args(self) -> tuple[str, ...]:
        return tuple(shlex.split(self.extra))

    @property
    def num_devices(self) -> int:
        return self.tensor_parallel * self.data_parallel * self.pipeline_parallel

    def steps(self) -> dict[int, int]:
        """The schedule as {first number of requests: K}, in order; empty if there is none."""
        if not self.schedule:
            return {}
        pairs = re.findall(r"(\d+):(\d+)(?:,|$)", self.schedule)
        if ",".join(f"{start}:{k}" for start, k in pairs) != self.schedule:
            raise ConfigError(f"--schedule is {self.schedule!r}; expected `1:3,9:1,33:0`.")
        result = {int(start): int(k) for start, k in pairs}
        if list(result) != sorted(result) or len(result) != len(pairs) or min(result) != 1:
            raise ConfigError(
                f"--schedule is {self.schedule!r}; expected rising numbers of requests from 1."
            )
        return result


def _flag(name: str) -> str:
    return name.replace("_", "-")
