"""How long `headstart --help` takes, as a ratio to a bare start of Python. Budget: 0.3 s.

python benchmarks/help_time.py [--repeats 15]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time


def seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    bare: list[float] = []
    helped: list[float] = []
    for _ in range(repeats):  # alternating, so that a busy moment hits both
        bare.append(seconds([sys.executable, "-c", "pass"]))
        helped.append(seconds([sys.executable, "-m", "headstart", "--help"]))
    result = {
        "help_seconds": round(statistics.median(helped), 3),
        "python_seconds": round(statistics.median(bare), 3),
        "repeats": repeats,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
