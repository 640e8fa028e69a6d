"""Exact mode on a GPU: a row's bits beside any others, and texts whatever is drafted.

python scripts/gpu_exact_check.py            sizes of MiMo-7B, bf16
python scripts/gpu_exact_check.py --small    sizes for Triton's interpreter, to try the script
python scripts/gpu_exact_check.py --families qwen3_next,deepseek_v32   tiny engines of these alone

Every kernel of the trunk gives 40 rows alone, among 1 to 40 rows, and at all 40 positions. Then
whole engines answer the same prompts for several K, batches, chunks and memory sizes. Prints one
JSON line; exits 1 if a bit or a token differs in exact mode. What plain kernels do is only
reported.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch
from exact_check.engines import check_engines, check_families
from exact_check.kernels import check_kernels
from exact_check.sizes import SMALL, Sizes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="of the engines")
    parser.add_argument("--families", help="tiny engines of these, and no kernels by themselves")
    asked = parser.parse_args()
    sizes = SMALL if asked.small else Sizes()
    started = time.perf_counter()
    if asked.families:
        wrong = check_families(sizes, asked.device, asked.dtypes.split(","), asked.families)
        seconds = round(time.perf_counter() - started, 1)
        print(json.dumps({"failures": wrong, "torch": torch.__version__, "seconds": seconds}))
        return 1 if wrong else 0
    with torch.inference_mode():
        kernels = check_kernels(
            sizes, asked.device, torch.float32 if asked.small else torch.bfloat16
        )
    kernel_seconds = time.perf_counter() - started
    engines = check_engines(sizes, asked.device, asked.dtypes.split(","))
    exact = {name: entry for name, entry in engines.items() if "exact" in name}
    failures = [f"kernel: {n}" for n, bad in kernels.items() if bad and "plain" not in n]
    failures += [
        f"engine: {name}"
        for name, entry in exact.items()
        if entry["first difference"] is not None or not entry["same log-probabilities"]
    ]
    if not any(entry["preemptions"] for entry in exact.values()):
        failures.append("no request was preempted: the check proves less than it should")
    if not any(0.1 < entry["first draft accepted"] < 0.98 for entry in exact.values()):
        failures.append("the head is always right or always wrong: the check proves nothing")
    name = torch.cuda.get_device_name() if asked.device.startswith("cuda") else asked.device
    print(
        json.dumps(
            {
                "device": name, "torch": torch.__version__, "failures": failures,
                "orders_with_other_bits": kernels, "engines": engines,
                "kernel_seconds": round(kernel_seconds, 1),
                "seconds": round(time.perf_counter() - started, 1),
            }
        )
    )  # fmt: skip
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
