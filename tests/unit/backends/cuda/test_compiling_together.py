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


def _kernel(x: Any) -> None:
    pass


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
    kernel: Any = JITFunction(_kernel)
    with compiled_together():
        kernel[(1,)](5)
        kernel[(1,)](6)
    assert sorted(compiled) == [5, 6], "all is compiled when the block ends"
    kernel[(1,)](7)
    assert seen == [(True, True), (True, True), (False, False)]
    assert JITFunction.run is run


def test_other_threads_launch_as_always(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def run(self: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> None:
        seen.append(warmup)

    monkeypatch.setattr(JITFunction, "run", run)
    kernel: Any = JITFunction(_kernel)
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

    class Forgetful(AsyncCompileMode):  # type: ignore[misc]
        def __exit__(self, *trouble: object) -> None:
            raise RuntimeError("does not compile")

    monkeypatch.setattr(compiling, "AsyncCompileMode", Forgetful)
    launch = JITFunction.run
    with pytest.raises(RuntimeError, match="does not compile"), compiled_together():
        assert active_mode.get() is not None
    assert JITFunction.run is launch and active_mode.get() is None


def test_an_error_leaves_launches_as_they_were() -> None:
    launch = JITFunction.run
    with pytest.raises(ZeroDivisionError), compiled_together():
        _ = 1 / 0
    assert JITFunction.run is launch and active_mode.get() is None


def test_what_was_compiled_is_found_by_launches(tmp_path: Path) -> None:
    printed = run_compiled(SCRIPTS / "compile_together.py", tmp_path)
    assert printed.strip() == "['CompiledKernel', 'CompiledKernel']"
