"""The generator: fixed for ever by test vectors, and random enough."""

from __future__ import annotations

import math
import random

import pytest
import torch
from support.sampling_reference import chi_square, reference_bits
from torch import Tensor

from headstart.sampling import noise
from headstart.sampling.noise import ACCEPTANCE, CHOICE, RESIDUAL, bits, gumbel, row_key, uniform
from headstart.sampling.params import derive_seed, mix64

# (seed, position, token, purpose): bits. A change here changes every seeded text.
VECTORS = {
    (0, 0, 0, 0): 0x32F15DB3,
    (0, 0, 1, 0): 0xA68ABF62,
    (0, 1, 0, 0): 0x4181DBF0,
    (1, 0, 0, 0): 0xC7015BD2,
    (0, 0, 0, 1): 0x5F62358F,
    (0, 0, 0, 2): 0xA22C5A74,
    (42, 1000, 151679, 0): 0x727C67DA,
    (18446744073709551615, 2147483648, 50256, 0): 0x8902D249,
    (81985529216486895, 4095, 7, 2): 0x8112C27D,
}
DERIVED, KEY = 0xEA44AB89B4192DB3, 0x48218226FF3CD4BF


def unsigned(word: Tensor) -> Tensor:
    return word.to(torch.int64) & 0xFFFFFFFF


@pytest.mark.parametrize(("place", "expected"), VECTORS.items(), ids=str)
def test_the_generator_gives_its_test_vectors(
    place: tuple[int, int, int, int], expected: int
) -> None:
    seed, position, token, purpose = place
    assert int(unsigned(bits([seed], [position], torch.tensor([token]), purpose))) == expected


def test_tensors_give_the_same_bits_as_the_reference_in_plain_integers() -> None:
    draw = random.Random(1)
    seeds = [0, 1, 2**63, 2**64 - 1, *(draw.getrandbits(64) for _ in range(60))]
    positions = [0, 1, 2**31, 2**40, *(draw.randrange(100_000) for _ in range(60))]
    tokens = torch.tensor([0, 1, 2, 255, 65_535, 151_679, 2**31 - 1])
    for purpose in (CHOICE, ACCEPTANCE, RESIDUAL):
        expected = [
            [reference_bits(s, p, t, purpose) for t in tokens.tolist()]
            for s, p in zip(seeds, positions, strict=True)
        ]
        assert unsigned(bits(seeds, positions, tokens, purpose)).tolist() == expected
        as_tensors = torch.tensor([s - 2**64 if s >> 63 else s for s in seeds])
        found = bits(as_tensors, torch.tensor(positions), tokens, torch.tensor(purpose))
        assert unsigned(found).tolist() == expected, "keys mixed on tensors differ"


def test_a_token_has_the_same_noise_in_any_selection_of_tokens() -> None:
    tokens = torch.arange(50_003)
    seeds, positions = [3, 4], [10, 11]
    whole = gumbel(seeds, positions, tokens)
    for count in (1, 2, 7, 50, 1000):
        chosen = torch.randint(0, 50_003, (2, count), generator=torch.Generator().manual_seed(0))
        assert torch.equal(gumbel(seeds, positions, chosen), whole.gather(1, chosen))
    assert torch.equal(gumbel(seeds[1:], positions[1:], tokens), whole[1:])


def test_purposes_are_per_row_when_given_as_a_tensor() -> None:
    tokens = torch.arange(9)
    both = bits([5, 5], [1, 1], tokens, torch.tensor([ACCEPTANCE, RESIDUAL]))
    assert torch.equal(both[0], bits([5], [1], tokens, ACCEPTANCE)[0])
    assert torch.equal(both[1], bits([5], [1], tokens, RESIDUAL)[0])
    assert not torch.equal(both[0], both[1])


def test_the_ends_of_the_range_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = torch.tensor([[0, 1, 2**31 - 1, -(2**31), -2, -1]], dtype=torch.int32)
    monkeypatch.setattr(noise, "bits", lambda *_: ends.clone())
    u = uniform([0], [0], torch.arange(6))
    assert u.min() == 2.0**-33 and u.max() == 1 - 2.0**-24
    g = gumbel([0], [0], torch.arange(6))
    assert g[0, 0] == g.max() == pytest.approx(noise.LARGEST_GUMBEL, abs=1e-3)
    assert g[0, -1] == g.min() == pytest.approx(noise.SMALLEST_GUMBEL, abs=1e-3)
    assert g[0, 0] - g[0, 1] == pytest.approx(math.log(3), abs=1e-3), "the tail is coarse"


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_every_byte_is_uniform(shift: int) -> None:
    words = unsigned(bits([11, 12, 13, 14], [0, 1, 2, 3], torch.arange(50_000)))
    counts = ((words >> shift) & 255).flatten().bincount(minlength=256)
    statistic, bound = chi_square(counts, torch.full((256,), 1 / 256))
    assert statistic < bound


NEIGHBOURS = {
    "tokens": lambda: (_words([9], [5], 0), _words([9], [5], 1)),
    "positions": lambda: (_rows(lambda i: (9, i)), _rows(lambda i: (9, i + 1))),
    "seeds": lambda: (_rows(lambda i: (i, 5)), _rows(lambda i: (i + 1, 5))),
    "purposes": lambda: (_words([9], [5], 0), _words([9], [5], 0, ACCEPTANCE)),
    "samples": lambda: (
        _rows(lambda i: (derive_seed(9, i), 5)),
        _rows(lambda i: (derive_seed(9, i + 1), 5)),
    ),
    "position and token moved together": lambda: (_words([9], [5], 0), _words([9], [6], 1)),
    "seed and position moved against each other": lambda: (
        _rows(lambda i: (i, 10_000 - i)),
        _rows(lambda i: (i + 1, 9_999 - i)),
    ),
}


def _words(seeds: list[int], positions: list[int], first: int, purpose: int = CHOICE) -> Tensor:
    return unsigned(bits(seeds, positions, torch.arange(first, first + 40_000), purpose)).flatten()


def _rows(place: object) -> Tensor:
    places = [place(i) for i in range(10_000)]
    seeds, positions = [s for s, _ in places], [p for _, p in places]
    return unsigned(bits(seeds, positions, torch.tensor([0, 1, 17, 151_000]))).flatten()


@pytest.mark.parametrize("neighbours", NEIGHBOURS.values(), ids=NEIGHBOURS.keys())
def test_neighbours_are_independent(neighbours: object) -> None:
    here, there = neighbours()
    for shift in (0, 14, 28):
        pairs = ((here >> shift) & 15) * 16 + ((there >> shift) & 15)
        statistic, bound = chi_square(pairs.bincount(minlength=256), torch.full((256,), 1 / 256))
        assert statistic < bound, f"bits {shift} to {shift + 3}"
    flips = torch.stack([((here ^ there) >> bit) & 1 for bit in range(32)]).double().mean(-1)
    assert (flips - 0.5).abs().max() < 4.5 * 0.5 / math.sqrt(len(here))


def test_the_test_of_independence_would_see_a_generator_that_only_adds() -> None:
    here = torch.arange(40_000)
    pairs = (here & 15) * 16 + ((here + 1) & 15)
    statistic, bound = chi_square(pairs.bincount(minlength=256), torch.full((256,), 1 / 256))
    assert statistic > bound


def test_the_largest_sum_with_gumbel_noise_follows_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0, -6.0])
    count = 60_000
    sums = logits + gumbel(range(count), [7] * count, torch.tensor([5, 9, 70, 151_000, 3, 2]))
    counts = sums.argmax(-1).bincount(minlength=6)
    statistic, bound = chi_square(counts, logits.double().softmax(-1))
    assert statistic < bound
    flat, _ = chi_square(counts, (logits * 0.9).double().softmax(-1))
    assert flat > bound, "a wrong temperature would have passed"


def test_gumbel_has_its_mean_and_variance() -> None:
    values = gumbel([1, 2, 3, 4], [0, 0, 0, 0], torch.arange(100_000)).double()
    assert values.mean() == pytest.approx(0.5772157, abs=0.01)
    assert values.var() == pytest.approx(math.pi**2 / 6, abs=0.02)


def test_samples_of_a_request_have_distinct_seeds_and_the_first_keeps_its_own() -> None:
    assert derive_seed(77, 0) == 77
    assert derive_seed(-1, 0) == 2**64 - 1
    seeds = {derive_seed(77, sample, prompt) for sample in range(50) for prompt in range(50)}
    assert len(seeds) == 2500
    assert derive_seed(77, 1) == mix64(mix64(77) + 0x9E3779B97F4A7C15) == DERIVED
    assert row_key(0, 0) == KEY


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        bits([1, 2], [3], torch.arange(4))
