"""What the benchmarks use of vLLM, over a calibrated checkpoint's cycle: their test's other engine.

Copied to a folder as the package `vllm`. Started without drafts it fails as vLLM does for classes
that it lacks.
"""

from __future__ import annotations

import atexit
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from headstart.calibrate.calibrated import agreement_of

__version__ = "0.0-stub"


class SamplingParams:
    def __init__(self, **fields: Any):
        self.max_tokens = fields["max_tokens"]


class _Engine:
    """`add_request`, `step` and what the driver asks of them: one token of each request a step."""

    def __init__(self, following: list[int]):
        self._following, self._running = following, dict[str, tuple[int, int]]()
        scheduler = {"max_num_batched_tokens": 8192, "enable_chunked_prefill": True}
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(**scheduler),
            compilation_config=SimpleNamespace(cudagraph_mode="FULL"),
            cache_config=SimpleNamespace(num_gpu_blocks=4096, block_size=16),
        )

    def add_request(self, name: str, prompt: dict[str, list[int]], params: SamplingParams) -> None:
        self._running[name] = prompt["prompt_token_ids"][-1], params.max_tokens

    def step(self) -> list[SimpleNamespace]:
        found = []
        for name, (last, left) in list(self._running.items()):
            token = self._following[last]
            self._running[name] = token, left - 1
            if left == 1:
                del self._running[name]
            output = SimpleNamespace(token_ids=[token])
            found.append(SimpleNamespace(request_id=name, outputs=[output]))
        return found

    def has_unfinished_requests(self) -> bool:
        return bool(self._running)

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self._running.pop(name, None)


class LLM:
    def __init__(self, model: str, **options: Any):
        if options["speculative_config"] is None:
            atexit.register(print, 'nanobind: leaked 514 functions!\n - leaked function "x"\n' * 99)
            raise ValueError("Model architectures ['Ours'] are not supported for now.")
        assert options["kv_cache_memory_bytes"] > 0
        print("INFO 11-18 [cuda.py:1] Using STUB attention backend out of potential backends.")
        self.llm_engine = _Engine(agreement_of(Path(model)).following.tolist())

    def generate(
        self, prompts: list[dict[str, list[int]]], params: SamplingParams, use_tqdm: bool
    ) -> list[SimpleNamespace]:
        texts: list[list[int]] = [[] for _ in prompts]
        for number, prompt in enumerate(prompts):
            self.llm_engine.add_request(str(number), prompt, params)
        while self.llm_engine.has_unfinished_requests():
            for found in self.llm_engine.step():
                texts[int(found.request_id)] += found.outputs[0].token_ids
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=own)]) for own in texts]
