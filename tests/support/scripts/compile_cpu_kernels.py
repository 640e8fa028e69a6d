"""Compile the kernels of this CPU once, for all test processes; `make test` does it beside mypy.

Without it each of them would compile for itself what the others have not kept yet.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from headstart.backends.numba.support import why_missing
from headstart.calibrate.tiny import write_tiny
from headstart.engine.engine import Engine


def main() -> None:
    if (missing := why_missing()) is not None:
        print(f"no kernels to compile: {missing}")
        return
    with TemporaryDirectory() as folder:
        model = write_tiny("mimo", Path(folder) / "model", dtype="F32")
        for weights in ("as-dtype", "int8", "int4"):
            engine = Engine(model, weights=weights, dtype="float32", speculate=3, kv_bytes=1 << 20)
            print(*(note for note in engine.notes if "compiled" in note), sep="\n")


if __name__ == "__main__":
    main()
