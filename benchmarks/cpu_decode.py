"""Decoding on a CPU, batch 1: our engine with and without drafts, against transformers' generate.

python benchmarks/cpu_decode.py --work DIR [--threads 2] [--tokens 128] [--repeats 3] [--out FILE]
                                [--llama-cpp URL]

Makes a calibrated checkpoint of SmolLM2-135M's shape (rate 0.8), loads it into every contender and
lets them answer in turn, so that a busy moment hits all of them. Reported are medians, and ratios
within this run; what the engine accepted is held against what walking the cycle predicts. The last
line of output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headstart.backends.options import Weights
from headstart.calibrate.agreement import walk
from headstart.calibrate.calibrated import agreement_of, write_calibrated
from headstart.checkpoint.reader import Checkpoint
from headstart.checkpoint.values import load
from headstart.engine.engine import Engine
from headstart.sampling.params import SamplingParams

SHAPE, RATE = "smollm2-135m", 0.8
PROMPT = list(range(100, 132))
Contender = Callable[[int], tuple[int, float]]  # tokens wanted -> tokens got, seconds


def ours(
    folder: Path, *, drafts: int, weights: Weights, threads: int, vocab: int | None
) -> Contender:
    """Our engine; without drafts it is started without a head."""
    engine = Engine(
        folder,
        device="cpu",
        speculate=drafts,
        weights=weights,
        threads=threads,
        max_model_len=2048,
        kv_bytes=1 << 28,
        prefix_caching=False,
        draft_vocab=range(2, vocab + 2) if vocab else None,
    )
    agreement = agreement_of(folder)

    def run(tokens: int) -> tuple[int, float]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        started = time.perf_counter()
        (result,) = engine.generate([PROMPT], params)
        seconds = time.perf_counter() - started
        got = result.outputs[0]
        drafted, accepted = walk(agreement, PROMPT[-1], tokens, drafts)
        counted = got.stats.acceptance
        if (counted.drafted, counted.accepted) != (drafted, accepted) and drafts:
            raise SystemExit(f"acceptance {counted.accepted} is not the predicted {accepted}")
        return len(got.token_ids), seconds

    return run


def theirs(folder: Path, threads: int) -> Contender:
    """transformers' generate on the same weights, as the Qwen2 model that the layout is."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    checkpoint = Checkpoint.open(folder)
    raw = {k: v for k, v in checkpoint.config.raw.items() if k not in ("model_type", "auto_map")}
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**raw))
    state = {n: load(checkpoint.source(n)) for n in checkpoint.tensors if "mtp_layers" not in n}
    model = model.to_empty(device="cpu").float()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and all("rotary" in name for name in missing), (missing, unexpected)
    rotary = model.model.rotary_emb
    inverse, _ = rotary.compute_default_rope_parameters(model.config)
    rotary.inv_freq = inverse
    rotary.original_inv_freq = inverse
    model.eval()

    def run(tokens: int) -> tuple[int, float]:
        torch.set_num_threads(threads)
        ids = torch.tensor([PROMPT])
        started = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
                pad_token_id=0, attention_mask=torch.ones_like(ids),
            )  # fmt: skip
        return out.shape[1] - len(PROMPT), time.perf_counter() - started

    return run


def llama_cpp(url: str) -> Contender:
    """A llama.cpp server that somebody started with a model of the same shape."""
    import urllib.request

    def run(tokens: int) -> tuple[int, float]:
        body = {"prompt": PROMPT, "n_predict": tokens, "temperature": 0, "cache_prompt": False}
        request = urllib.request.Request(
            f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        started = time.perf_counter()
        with urllib.request.urlopen(request, timeout=600) as answer:
            got = json.load(answer)
        return int(got["tokens_predicted"]), time.perf_counter() - started

    return run


def measure(contenders: dict[str, Contender], tokens: int, repeats: int) -> dict[str, float]:
    """Median tokens per second of each, in alternation, after one warm-up."""
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):
        for name, run in contenders.items():
            got, seconds = run(tokens if repeat else 16)
            if repeat:
                speeds[name].append(got / seconds)
    return {name: statistics.median(values) for name, values in speeds.items()}


def report(speeds: dict[str, float], arguments: argparse.Namespace) -> dict[str, Any]:
    plain = {kind: speeds[f"{kind} K=0"] for kind in ("fp32", "int8")}
    best = {
        kind: max((n for n in speeds if n.startswith(kind)), key=lambda name: speeds[name])
        for kind in plain
    }
    ratios = {
        "fp32 K=0 over transformers": plain["fp32"] / speeds["transformers fp32"],
        "int8 K=0 over transformers": plain["int8"] / speeds["transformers fp32"],
        **{f"{best[kind]} over {kind} K=0": speeds[best[kind]] / plain[kind] for kind in plain},
    }
    return {
        "tokens_per_second": {name: round(value, 2) for name, value in speeds.items()},
        "ratios": {name: round(value, 2) for name, value in ratios.items()},
        "shape": SHAPE,
        "rate": RATE,
        "prompt_tokens": len(PROMPT),
        "tokens": arguments.tokens,
        "threads": arguments.threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-drafts", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=8000, help="draft vocabulary = active tokens")
    parser.add_argument("--llama-cpp", metavar="URL")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    folder = arguments.work / f"{SHAPE}-active{arguments.vocab}"
    if not folder.exists():
        write_calibrated(SHAPE, RATE, folder, active=arguments.vocab, dtype="F32")
    contenders: dict[str, Contender] = {"transformers fp32": theirs(folder, arguments.threads)}
    formats: dict[Weights, str] = {"as-dtype": "fp32", "int8": "int8"}
    for weights, kind in formats.items():
        for drafts in range(arguments.max_drafts + 1):
            for vocab in (None, arguments.vocab) if drafts else (None,):
                name = f"{kind} K={drafts}" + (f" vocabulary {vocab}" if vocab else "")
                contenders[name] = ours(
                    folder, drafts=drafts, weights=weights, threads=arguments.threads, vocab=vocab
                )
    if arguments.llama_cpp:
        contenders["llama.cpp"] = llama_cpp(arguments.llama_cpp)
    result = report(measure(contenders, arguments.tokens, arguments.repeats), arguments)
    for name, value in result["tokens_per_second"].items():
        print(f"{name:32} {value:8.1f} tokens/s")
    for name, value in result["ratios"].items():
        print(f"{name:48} {value:6.2f}x")
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
