"""Kernels called by several threads."""

from __future__ import annotations

import pytest

pytest.importorskip("numba")

from headstart.backends.numba.thread_pool import POOL


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), SystemExit(143)], ids=repr)
def test_a_signal_inside_a_kernel_is_what_its_handler_raised(raised: BaseException) -> None:
    """Every call from C that a signal interrupts ends with a SystemError, one inside the other."""

    def kernel() -> None:
        inner = SystemError("<function _numba_unpickle> returned a result with an exception set")
        inner.__cause__ = raised
        raise SystemError("returned a result with an exception set") from inner

    with pytest.raises(type(raised)) as found:
        POOL.run(0, kernel)
    assert found.value is raised


def test_other_errors_of_the_interpreter_stay_as_they_are() -> None:
    def kernel() -> None:
        raise SystemError("bad call") from ValueError("odd")

    with pytest.raises(SystemError, match="bad call"):
        POOL.run(0, kernel)
