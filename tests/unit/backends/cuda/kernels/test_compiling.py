"""The kernels compile for a GPU, too: the interpreter is more patient than the compiler."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import SCRIPTS
from support.compiled_script import run_compiled
from support.long_runs import unless_long

pytest.importorskip("triton")


def test_kernels_compile_for_sm_90(tmp_path: Path) -> None:
    words = unless_long((), ("--long",))
    printed = run_compiled(SCRIPTS / "compile_kernels.py", tmp_path, *words)
    assert "int8 _best_of_tile" in printed and "moe _down" in printed
    assert "moe_vector _second" in printed and "int8_choice _best_of_tile" in printed
    assert printed.count("latent _attend") == unless_long(1, 3)
    assert "index_choice _scores" in printed and "index_choice _choose" in printed
    assert "fp8_products _gated" in printed and "groups _linear" in printed
    assert "streamed _linear" in printed and "streamed _gated" in printed
    assert (
        printed.count("kernels.attention _attend") == unless_long(3, 8)
        and "too much: headstart" in printed
    )
