"""What keys and values in 8-bit floats change in a model's predictions, answers and drafts.

python benchmarks/kv_quality.py MODEL --text FILE [--tokens 4096] [--window 512]
    [--answers 8] [--answer-tokens 96] [--out FILE]

Runs on a CPU, where `kv_dtype fp8` rounds keys and values as the kernels of a GPU do and computes
in fp32. Over windows of the text: perplexity, how often the most likely token is that of K/V as
they are, and the mean KL divergence; of the scales that the engine uses (one per token and head)
and, to compare, of e4m3 without any scale. Then greedy answers to the first words of paragraphs of
the text, with K = 3: how many are the same, after how many tokens the others leave, and the
acceptance length of both. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from weights_quality import log_probs

from headstart.engine.engine import Engine
from headstart.models import attention
from headstart.models.kv_fp8 import rounded_kv
from headstart.sampling.params import SamplingParams

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kernels": "off"}
_PROMPT_WORDS = 24


def without_scale(values: Tensor) -> Tensor:
    """As engines round that know no scale."""
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).to(values.dtype)


SCALES: dict[str, Callable[[Tensor], Tensor]] = {
    "one per token and head": rounded_kv, "none": without_scale,
}  # fmt: skip


def compare_windows(model: Path, text: list[int], window: int) -> list[dict[str, Any]]:
    """A row for each way to round."""
    plain, rounding = (
        Engine(model, speculate=0, kv_bytes=1 << 28, kv_dtype=kind, **OPTIONS)
        for kind in ("as-dtype", "fp8")
    )
    sums = {name: [0.0, 0.0, 0.0] for name in SCALES}  # loss, same tokens, divergence
    loss, count = 0.0, 0
    for start in range(0, len(text) - 1, window):
        part = text[start : start + window]
        following = torch.tensor(part[1:])[:, None]
        wanted = log_probs(plain, part)[:-1]
        loss -= float(wanted.gather(1, following).sum())
        count += len(following)
        for name, form in SCALES.items():
            with patch.object(attention, "rounded_kv", form):
                found = log_probs(rounding, part)[:-1]
            own = sums[name]
            own[0] -= float(found.gather(1, following).sum())
            own[1] += float((wanted.argmax(-1) == found.argmax(-1)).sum())
            own[2] += float((wanted.exp() * (wanted - found)).sum())
    base = math.exp(loss / count)
    return [
        {
            "scales": name, "positions": count, "perplexity": round(base, 4),
            "perplexity_rounded": round(math.exp(own[0] / count), 4),
            "change_percent": round(100 * (math.exp((own[0] - loss) / count) - 1), 3),
            "same_most_likely_token": round(own[1] / count, 4),
            "mean_kl": round(own[2] / count, 6),
        }
        for name, own in sums.items()
    ]  # fmt: skip


def compare_answers(model: Path, prompts: Sequence[str], tokens: int) -> dict[str, Any]:
    """Greedy answers with drafts, as they are and rounded."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    texts, lengths = [], []
    for kind in ("as-dtype", "fp8"):
        engine = Engine(model, speculate=3, kv_bytes=1 << 28, kv_dtype=kind, **OPTIONS)
        results = [engine.generate([prompt], params)[0] for prompt in prompts]
        texts.append([result.outputs[0].token_ids for result in results])
        origins = [origin for result in results for origin in result.outputs[0].origins]
        rounds = sum(origin != "accepted" for origin in origins)
        lengths.append(len(origins) / max(1, rounds))
    first = [_same_tokens(*pair) for pair in zip(*texts, strict=True)]
    return {
        "answers": len(prompts), "tokens_each": tokens,
        "same_answers": sum(count == tokens for count in first), "tokens_before_leaving": first,
        "acceptance_length": round(lengths[0], 3),
        "acceptance_length_rounded": round(lengths[1], 3),
    }  # fmt: skip


def _same_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that two answers begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--answer-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, help="write the JSON there, too")
    given = parser.parse_args()
    words = given.text.read_text()
    reader = Engine(given.model, speculate=0, kv_bytes=1 << 30, **OPTIONS)
    text = reader.prompts.read(words[: 4 * given.tokens])[: given.tokens]
    rows = compare_windows(given.model, text, given.window)
    for row in rows:
        print(row, flush=True)
    parts = [part for part in words.split("\n\n") if len(part.split()) > 2 * _PROMPT_WORDS]
    step = max(1, len(parts) // max(1, given.answers))
    prompts = [" ".join(part.split()[:_PROMPT_WORDS]) for part in parts[::step]][: given.answers]
    answers = compare_answers(given.model, prompts, given.answer_tokens) if prompts else {}
    print(answers, flush=True)
    document = {
        "processor": platform.processor() or platform.machine(), "torch": torch.__version__,
        "text": given.text.name, "windows": rows, "answers": answers,
    }  # fmt: skip
    if given.out is not None:
        given.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
