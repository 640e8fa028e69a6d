"""Tune a head on a CPU in five minutes: a few answers of the model, a few steps.

    python examples/tune_a_head.py MODEL PROMPTS.jsonl WORK [STEPS]

Enough to see it learn; docs/training.md and recipes/demo_head say how it is done in earnest.
"""

import shlex
import subprocess
import sys

if len(sys.argv) not in (4, 5):
    sys.exit("usage: python examples/tune_a_head.py MODEL PROMPTS.jsonl WORK [STEPS]")
model, prompts, work = sys.argv[1:4]
steps = sys.argv[4] if len(sys.argv) > 4 else "100"


def headstart(*words: str) -> None:
    print("$ headstart", shlex.join(words), flush=True)
    if code := subprocess.run([sys.executable, "-m", "headstart", *words]).returncode:
        sys.exit(code)  # it has said why


# The model's own answers; what its head drafts now is not needed for that.
headstart(
    "distill", model, "--prompts", prompts, "--out", f"{work}/data", "--limit", "100",
    "--max-tokens", "64", "--keep-truncated", "--heldout", "0.2", "--speculate", "0",
)  # fmt: skip
# Drafts from a few tokens: less to compute in training and in use.
headstart(
    "vocab", model, "--data", f"{work}/data", "--size", "4096", "--by", "none",
    "--bandwidth", "50", "--out", f"{work}/vocab.json",
)  # fmt: skip
headstart(
    "train", model, "--data", f"{work}/data", "--out", f"{work}/run", "--max-steps", steps,
    "--epochs", "1000", "--batch-sequences", "4", "--learning-rate", "1e-3",
    "--draft-vocab", f"{work}/vocab.json", "--eval-limit", "20",
)  # fmt: skip
print(f"tuned head: {work}/run/head; what it brings: {work}/run/report.html")
