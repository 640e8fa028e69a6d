"""Launches that compile and do not run, on a compiler that only takes notes."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from support import SCRIPTS
from support.compiled_script import run_compiled

pytest.importorskip("triton")

from triton import AsyncCompileMode
from triton.runtime._async_compile import active_mode
from triton.runtime.jit import JITFunction

from headstart.backends.cuda import compiling
from headstart.backends.cuda.compiling import compiled_together
from headstart.backends.cuda.kernels.jit import Kernel


def _kernel(x: Any) -> None:
    pass


def launches_run(monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a launch now runs its kernel."""
    seen: list[bool] = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *_, warmup, **__: seen.append(warmup))
    Kernel(_kernel)[(1,)](5)
    return seen == [False]


def test_launches_inside_compile_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool]] = []
    compiled: list[int] = []

    def run(self: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> None:
        mode = active_mode.get()
        seen.append((warmup, mode is not None))
        if mode is not None:
            rest = (lambda kernel: None,) * (mode.submit.__code__.co_argcount - 3)
            mode.submit(len(seen), lambda: compiled.append(given[0]), *rest)

    monkeypatch.setattr(JITFunction, "run", run)
    kernel: Any = Kernel(_kernel)
    with compiled_together():
        kernel[(1,)](5)
        kernel[(1,)](6)
    assert sorted(compiled) == [5, 6], "all is compiled when the block ends"
    kernel[(1,)](7)
    assert seen == [(True, True), (True, True), (False, False)]


def test_other_threads_launch_as_always(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def run(self: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> None:
        seen.append(warmup)

    monkeypatch.setattr(JITFunction, "run", run)
    kernel: Any = Kernel(_kernel)
    with compiled_together():
        other = Thread(target=lambda: kernel[(1,)](5))
        other.start()
        other.join()
        kernel[(1,)](6)
    assert seen == [False, True]


def test_a_kernel_that_does_not_compile_breaks_no_later_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton 3.6 and 3.7 leave their mode behind then; so does this one."""

    class Forgetful(AsyncCompileMode):
        def __exit__(self, *trouble: object) -> None:
            raise RuntimeError("does not compile")

    monkeypatch.setattr(compiling, "AsyncCompileMode", Forgetful)
    with pytest.raises(RuntimeError, match="does not compile"), compiled_together():
        assert active_mode.get() is not None
    assert active_mode.get() is None and launches_run(monkeypatch)


def test_an_error_leaves_launches_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError), compiled_together():
        _ = 1 / 0
    assert active_mode.get() is None and launches_run(monkeypatch)


def test_what_was_compiled_is_found_by_launches(tmp_path: Path) -> None:
    printed = run_compiled(SCRIPTS / "compile_together.py", tmp_path)
    assert printed.strip() == "['CompiledKernel', 'CompiledKernel']"
