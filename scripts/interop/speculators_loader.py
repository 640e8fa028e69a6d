"""Runs inside the environment that has speculators: loads a head with its own loader.

Argument: a head folder. Prints one JSON line: versions, how many tensors were loaded as stored,
which differ from the file, and which are not finite (those taken from the verifier included).
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file
from speculators import SpeculatorModel  # type: ignore[import-not-found]


def main() -> None:
    folder = Path(sys.argv[1])
    stored = load_file(folder / "model.safetensors")
    model = SpeculatorModel.from_pretrained(str(folder))
    loaded = {n: v for n, v in model.state_dict().items() if n.startswith("mtp_layers.")}
    names = stored.keys() | loaded.keys()
    same = {n for n in stored.keys() & loaded.keys() if torch.equal(stored[n], loaded[n])}
    broken = [n for n, v in model.state_dict().items() if not torch.isfinite(v).all()]
    packages = ("speculators", "torch", "transformers")
    answer = {
        "versions": {name: version(name) for name in packages},
        "class": type(model).__name__,
        "loaded": len(same),
        "different": sorted(names - same),
        "not_finite": broken,
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
