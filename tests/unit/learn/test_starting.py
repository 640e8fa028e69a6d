"""How a learner is set up for the machine that it finds."""

from __future__ import annotations

import pytest
import torch

from headstart.learn.assembly import learning_options
from headstart.learn.starting import is_on


@pytest.mark.parametrize(
    ("found", "dtype"),
    [({"avx512_bf16": True}, "bfloat16"), ({"amx_bf16": True}, "bfloat16"), ({}, "float32")],
)
def test_a_cpu_computes_in_what_it_multiplies_fastest(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, bool], dtype: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    assert learning_options({}, device="cpu", dtype="auto").dtype == dtype
    assert learning_options({"dtype": "float64"}, device="cpu", dtype="auto").dtype == "float64"
    assert learning_options({}, device="cpu", dtype="float32").dtype == "float32"


def test_names_of_one_device() -> None:
    assert is_on("cuda", "cuda:0") and is_on("cpu", "cpu")
    assert not is_on("cuda:1", "cuda") and not is_on("cpu", "cuda:0")
