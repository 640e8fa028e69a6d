"""What `make demo` runs: the main job on a small checkpoint made on the spot."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from headstart.calibrate.tiny import write_tiny

STEPS = (
    "inspect model",
    "export model --out head --format headstart",
    "convert head --to xllm --out head-xllm",
    "inspect finetuned",
    "restore finetuned --from model --out restored",
    "inspect restored",
)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="headstart-demo-") as folder:
        print("making a tiny GLM-4.5-shaped checkpoint, and a copy that lost its head")
        write_tiny("glm4_moe", Path(folder) / "model")
        write_tiny("glm4_moe", Path(folder) / "finetuned", with_head=False)
        for step in STEPS:
            print(f"\n$ headstart {step}", flush=True)
            command = [sys.executable, "-m", "headstart", *step.split()]
            code = subprocess.run(command, cwd=folder).returncode
            if code:
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
