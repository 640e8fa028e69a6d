"""Runs inside the environment that has vLLM: greedy tokens and draft counters of checkpoints.

First prints its versions as one JSON line. Then reads jobs from stdin, one JSON object per line
({"model": folder, "depth": K, "dtype": name, "given": token ids or null for the usual ones,
"speculative": further keys of the speculative config, "engine": further arguments of LLM,
"swapped": the folder of a head that is swapped in before the prompts, by our worker extension,
"after": a worker's method that is called behind them and one more, short answer}; K = 0 means
without speculation), and
answers each with one JSON line: the tokens of every prompt, the number of drafts, how many were
accepted at each depth (cumulative, as vLLM counts them), and what the method returned - or an
error. One engine at a time, all in this process, so that starting Python and importing vLLM is
paid once.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import traceback
from importlib.metadata import version
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    HF_HUB_OFFLINE="1",
)
NUM_PROMPTS, PROMPT_TOKENS, NUM_TOKENS = 6, 12, 64
COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted",
}


def prompts(vocab_size: int) -> list[list[int]]:
    """The same token ids on every machine; the two lowest ids (begin, end) are left out."""
    draw = random.Random(0)
    return [
        [draw.randrange(2, vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)
    ]


def run(
    model: str,
    depth: int,
    dtype: str,
    given: list[list[int]] | None = None,
    speculative: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    swapped: str | None = None,
    after: str | None = None,
) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    asked = {"method": "mtp", "num_speculative_tokens": depth, **(speculative or {})}
    llm = LLM(
        model=model,
        trust_remote_code=True,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,  # hybrid models have no CPU kernel for it
        disable_log_stats=False,
        speculative_config=asked if depth else None,
        **{"skip_tokenizer_init": True, **(engine or {})},
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False
    )
    vocab_size = llm.llm_engine.model_config.get_vocab_size()
    inputs = [{"prompt_token_ids": ids} for ids in given or prompts(vocab_size)]
    if swapped is not None:
        [said] = llm.collective_rpc("headstart_swap", args=(swapped,))
        if "error" in said:
            raise ValueError(said["error"])
    outputs = llm.generate(inputs, sampling, use_tqdm=False)
    result: dict[str, Any] = {"tokens": [list(o.outputs[0].token_ids) for o in outputs]}
    for metric in llm.get_metrics():
        if metric.name in COUNTERS:
            value = metric.values if hasattr(metric, "values") else metric.value
            result[COUNTERS[metric.name]] = value
    if after is not None:
        # Workers learn that an answer has ended with the next step, which an idle engine does not
        # make.
        short = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        llm.generate(inputs[:1], short, use_tqdm=False)
        result["after"] = llm.collective_rpc(after)
    llm.llm_engine.engine_core.shutdown()
    return result


def main() -> None:
    # vLLM prints to stdout; the answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm.distributed import cleanup_dist_env_and_memory

    names = ("vllm-cpu", "torch", "transformers")
    print(json.dumps({name: version(name) for name in names}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer = run(**json.loads(line))
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        gc.collect()
        cleanup_dist_env_and_memory()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
