"""Prompts that do not join a round are read while masks for that round are made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.kernel_runs import SIZES
from support.tiny_fixture import Tiny

from headstart.engine.engine import Engine
from headstart.sampling.params import SamplingParams

pytest.importorskip("triton")

VOCAB = SIZES["vocab_size"]
FIRST, SECOND = [3, 4, 5, 6], [5, 20, 31, 9]


class Halves:
    """A grammar: even tokens and odd ones take turns."""

    def __init__(self, state: int = 0):
        self.state = state

    def allowed(self) -> torch.Tensor:
        return torch.arange(VOCAB) % 2 == self.state % 2

    def accept(self, token: int) -> bool:
        fits = token % 2 == self.state % 2
        self.state += fits
        return fits

    def fork(self) -> Halves:
        return Halves(self.state)


@pytest.mark.usefixtures("quick_kernels")
def test_the_pass_comes_before_the_choice_and_changes_no_text(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headstart.backends.cuda.backend import CudaBackend
    from headstart.backends.cuda.device_rounds import CapturedRounds

    folder = tiny("mimo", rate=0.9, seed=1, dtype="F32", **SIZES)
    usual: dict[str, Any] = {
        "dtype": "float32", "speculate": 1, "block_size": 4, "kv_bytes": 1 << 21, "device": "cpu",
    }  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    calls: list[str] = []

    def noted(owner: type, name: str) -> None:
        own = getattr(owner, name)

        def call(self: Any, *given: Any) -> Any:
            calls.append(name)
            return own(self, *given)

        monkeypatch.setattr(owner, name, call)

    def answers(engine: Engine) -> list[list[int]]:
        """The second request comes when the first decodes."""
        names = [engine.add(FIRST, params, grammar=Halves())]
        engine.step()
        engine.step()
        calls.clear()
        names.append(engine.add(SECOND, params, grammar=Halves(1)))
        while engine.has_work:
            engine.step()
        return [engine.collect(name).outputs[0].token_ids for name in names]

    engine = Engine(folder, kernels="on", **usual)
    noted(CudaBackend, "trunk_pass")
    noted(CapturedRounds, "choose")
    monkeypatch.setattr(CapturedRounds, "joins", lambda *_: False)
    found = answers(engine)
    assert calls[:2] == ["trunk_pass", "choose"], "the round before had no choice left to make"
    assert found == answers(Engine(folder, kernels="off", **usual))
