"""Runs inside the environment that has vLLM: `vllm bench serve` with this program's own arguments,
once for every line on stdin; after each run one line is answered.

In one process, since importing vLLM takes longer than a run. The command `vllm` itself looks up a
package of that name, which the CPU build is not.
"""

from __future__ import annotations

import argparse
import os
import sys

from vllm.benchmarks.serve import add_cli_args, main

if __name__ == "__main__":
    # What it prints goes to stderr; the answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    for _ in sys.stdin:
        main(parser.parse_args())  # anew each time: a run writes into its options
        print("done", file=answers, flush=True)
