"""Losses of draft rows on a GPU: by kernels and by plain PyTorch, checked against each other.

PYTHONPATH=. python3 benchmarks/gpu_losses.py [--rows 12288] [--hidden 576] [--vocab 49152]

Three depths, one teacher, bf16, every loss, with and without a draft vocabulary. The last line is
one JSON document.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor

from headstart.train.losses import rows as loss_rows
from headstart.train.losses.kinds import KINDS
from headstart.train.losses.lm_head import LmHead
from headstart.train.losses.rows import RowLosses, depth_losses

REPEATS = 5
NUM_DEPTHS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=12288)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--drafts", type=int, default=8192)
    arguments = parser.parse_args()
    rows, hidden, vocab = arguments.rows, arguments.hidden, arguments.vocab
    torch.manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").bfloat16()

    weight, teacher = normal(vocab, hidden) / hidden**0.5 * 3, normal(rows, hidden)
    depths = [
        (teacher + 0.3 * (k + 1) * normal(rows, hidden)).bfloat16() for k in range(NUM_DEPTHS)
    ]
    labels = torch.randint(0, vocab, (rows,), device="cuda")
    ids = torch.randperm(vocab)[: arguments.drafts].sort().values
    found = []
    for size, head in ((vocab, LmHead.of(weight)), (arguments.drafts, LmHead.of(weight, ids))):
        for kind in KINDS:
            taught = teacher if KINDS[kind].needs_teacher else None

            def losses(
                head: LmHead = head, kind: str = kind, t: Tensor | None = taught
            ) -> list[RowLosses]:
                return depth_losses(kind, depths, head, labels=labels, teacher=t)

            fast, ours = timed(losses)
            with patch.object(loss_rows, "loss_kernels", lambda weight, num_rows: None):
                slow, plain = timed(losses)
            line = {"loss": kind, "draft_vocab": size, "kernels_ms": fast, "plain_ms": slow}
            line |= difference(ours, plain)
            print(line, flush=True)
            found.append(line)
    print(
        json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": found})
    )


def timed(losses: Callable[[], list[RowLosses]]) -> tuple[float, list[RowLosses]]:
    """Milliseconds, the best of a few, and what was found."""
    result, times = losses(), []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        started = time.monotonic()
        result = losses()
        torch.cuda.synchronize()
        times.append((time.monotonic() - started) * 1e3)
    return round(min(times), 2), result


def difference(ours: list[RowLosses], plain: list[RowLosses]) -> dict[str, float]:
    """The largest difference of a loss, and of gradients relative to the largest one."""
    loss = max(float((a.loss - b.loss).abs().max()) for a, b in zip(ours, plain, strict=True))
    steps = [
        float((a.gradient - b.gradient).float().abs().max() / b.gradient.float().abs().max())
        for a, b in zip(ours, plain, strict=True)
    ]
    return {"loss_difference": loss, "gradient_difference": max(steps)}


if __name__ == "__main__":
    main()
