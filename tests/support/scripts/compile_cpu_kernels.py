"""Compile the kernels of this CPU once, for all test processes; `make test` does it beside mypy.

Without it each of them would compile for itself what the others have not kept yet. Two processes
share the work: what one has compiled and kept, the other loads when it comes to need it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from headstart.backends.losses import Mixture
from headstart.backends.numba.compiler import why_missing
from headstart.calibrate.tiny import write_tiny
from headstart.engine.engine import Engine


def main() -> int:
    if (missing := why_missing()) is not None:
        print(f"no kernels to compile: {missing}")
        return 0
    if (child := os.fork()) == 0:
        compile_sampling()
        compile_others()
        return 0
    start()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def compile_sampling() -> None:
    """The choice of tokens, which is half of the work and the same for all weight formats."""
    from headstart.backends.numba.chooser import CompiledChooser

    CompiledChooser(256).warm_up()


def compile_others() -> None:
    """Formats and kinds of layers with which no engine is started here."""
    from headstart.backends.numba.delta import delta_net
    from headstart.backends.numba.eight_bit_products import eight_bit_product
    from headstart.backends.numba.experts import experts
    from headstart.backends.numba.group_products import group_product
    from headstart.backends.numba.latent import latent_attention
    from headstart.backends.numba.products import int8_product

    compile_losses()
    formats = (int8_product, group_product, eight_bit_product)
    for each in (*formats, experts, delta_net, latent_attention):
        assert each.address


def compile_losses() -> None:
    """Of rows in both precisions, with and without a distribution to compare with."""
    from headstart.backends.numba.losses import mix_, row_sums

    for dtype in (torch.bfloat16, torch.float32):
        logits, places = torch.zeros(2, 8, dtype=dtype), torch.zeros(2, dtype=torch.int64)
        norm = row_sums(logits).log_norm
        row_sums(logits, places, logits, norm)
        mix_(logits, norm, Mixture(norm), places)


def start() -> None:
    """Passes, which are the same for all weight formats, and the products of float32."""
    with TemporaryDirectory() as folder:
        model = write_tiny("mimo", Path(folder) / "model", dtype="F32")
        engine = Engine(model, dtype="float32", speculate=3, kv_bytes=1 << 20)
    print(*(note for note in engine.notes if "compiled" in note), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
