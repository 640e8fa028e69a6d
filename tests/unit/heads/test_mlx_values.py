"""Values that go to MLX and back: exact, or exactly the norms that BF16 rounds beside 1."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gguf_models import Fill, random_bits, write_head

from headstart.checkpoint.source import TensorSource
from headstart.checkpoint.values import load
from headstart.heads.formats import open_head
from headstart.heads.formats.gguf.archs import arch_of
from headstart.heads.formats.mlx_drafters import DRAFTERS
from headstart.heads.formats.mlx_spelling import spell_mlx, unspell_mlx, without_copies
from headstart.heads.head import Head


def head_of(family: str, folder: Path, fill: Fill) -> Head:
    arch = arch_of(family)
    assert arch is not None
    return without_copies(open_head(write_head(arch, folder, fill)))


def there_and_back(head: Head) -> dict[str, TensorSource]:
    return unspell_mlx(spell_mlx(head), head.family, Path("x"))[0]


def kept_of(norm: torch.Tensor) -> torch.Tensor:
    """What is left of a norm: one is added and taken away again, rounded to BF16 each time."""
    return ((norm.float() + 1).bfloat16().float() - 1).bfloat16()


@pytest.mark.parametrize("family", DRAFTERS)
def test_a_head_comes_back_but_for_the_norms_that_are_said(family: str, tmp_path: Path) -> None:
    head = head_of(family, tmp_path / "hf", random_bits(3))
    back = there_and_back(head)
    shifts = DRAFTERS[family].shifts_norms
    changed = set()
    for name, source in head.tensors.items():
        own, found = load(source), load(back[name])
        expected = kept_of(own) if shifts and name.endswith("norm.weight") else own
        if name.endswith(DRAFTERS[family].in_fp32 or ("none",)):
            expected = expected.float()
        assert found.dtype == expected.dtype, name
        assert torch.equal(found, expected), name
        if not torch.equal(found.float(), own.float()):
            changed.add(name)
    assert back.keys() - head.tensors.keys() <= {
        "modules.0.embed_tokens.weight", "modules.0.lm_head.weight",
    }  # fmt: skip
    assert bool(changed) == shifts and all(name.endswith("norm.weight") for name in changed)


@settings(max_examples=25, deadline=None)
@given(bits=st.lists(st.integers(0, 0xFFFF), min_size=64, max_size=64))
def test_norms_of_any_size_are_rounded_once_and_not_again(
    bits: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Values between -1 and 1, as trained norms of Qwen have them, tiny ones included."""
    small = [b if (b >> 7) & 0xFF < 127 else b & 0x807F for b in bits]

    def fill(name: str, shape: tuple[int, ...]) -> np.ndarray[None, np.dtype[np.uint16]]:
        return np.resize(np.array(small, dtype="<u2"), shape)

    head = head_of("qwen3_5", tmp_path_factory.mktemp("norms") / "hf", fill)
    once = there_and_back(head)
    again = there_and_back(Head(head.family, once, head.config, head.origin))
    for name, source in head.tensors.items():
        own, first, second = (load(each).float() for each in (source, once[name], again[name]))
        if not name.endswith("norm.weight"):
            assert torch.equal(own, first), name
            continue
        # Half a step of BF16 between 1 and 2; what is a multiple of a step stays.
        assert ((first - own).abs() <= 2**-8).all(), name
        on_step = own * 128 == (own * 128).round()
        assert torch.equal(first[on_step], own[on_step]), name
        assert torch.equal(first + 1, second + 1), name
