"""Products of some dozens of rows, whose tiles are fetched by descriptors, against PyTorch."""

from __future__ import annotations

import pytest
import torch
from support.kernel_inputs import DEVICE, layer_of, random

pytest.importorskip("triton")

from headstart.backends.cuda.forward import Kernels
from headstart.backends.cuda.int8 import Int8Rows, with_int8
from headstart.backends.cuda.kernels import int8_choice, streamed
from headstart.backends.cuda.kernels.int8 import choose_int8, integers
from headstart.backends.cuda.kernels.int8_choice import choose_streamed, chooser_for
from headstart.backends.cuda.kernels.linear import Shape
from headstart.backends.cuda.kernels.streamed import streamed_gated, streamed_linear
from headstart.sampling import noise

# One tile, one that is full, and a second one that is begun and full.
ROWS = [17, 32, 40, 64, 65, 80]


@pytest.mark.parametrize("rows", ROWS)
def test_products_in_splits(rows: int) -> None:
    x, weight = random(rows, 200, seed=1), random(70, 200)
    cut = Shape(outputs=32, inputs=64, splits=2)  # neither side is a multiple of its tile
    found = streamed_linear(x, weight, cut)
    assert found.shape == (2, rows, 70) and found.dtype == torch.float32
    torch.testing.assert_close(found.sum(0), x @ weight.T, rtol=1e-3, atol=1e-3)
    half = streamed_linear(x, weight, Shape(outputs=32, inputs=64))[0]
    assert not torch.allclose(found[0], half), "the first split is not all"


@pytest.mark.parametrize("rows", ROWS)
def test_gate_and_up_in_one_pass(rows: int) -> None:
    x, weight = random(rows, 96, seed=1), random(2 * 40, 96)
    gate, up = (x @ weight.T).chunk(2, -1)
    found = streamed_gated(x, weight, Shape(outputs=32, inputs=64))
    torch.testing.assert_close(found, torch.nn.functional.silu(gate) * up, rtol=1e-3, atol=1e-3)


def test_only_rows_and_matrices_that_gain_are_taken() -> None:
    half = torch.bfloat16
    weight = random(8, 64).to(half)
    taken = [rows for rows in (16, 17, 80, 81) if streamed.takes(random(rows, 64).to(half), weight)]
    assert taken == [17, 80]
    assert not streamed.takes(random(20, 64), weight.float()), "fp32 has no fast products"
    assert not streamed.takes(random(20, 60).to(half), random(8, 60).to(half)), "rows of 120 bytes"


@pytest.mark.parametrize(
    ("capability", "is_capable"),
    [((8, 0), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)],
)
def test_gpus_with_a_copy_engine_and_room(
    capability: tuple[int, int], is_capable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = streamed.has_copy_engine.__wrapped__(torch.device("cuda", 0))
    assert found == is_capable


def test_products_of_half_precision_go_there() -> None:
    x, layer, kernels = random(40, 64, seed=1).half() / 8, layer_of(80, 64), Kernels()
    layer.weight = torch.nn.Parameter(layer.weight.half(), requires_grad=False)
    plain = x.float() @ layer.weight.float().T
    found = kernels.product(x, layer)
    assert found.dtype == torch.float32, "sums of splits, not a library's result"
    torch.testing.assert_close(found.sum(0), plain, rtol=2e-3, atol=2e-3)
    gate, up = plain.chunk(2, -1)
    wanted = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(kernels.gated(x, layer).float(), wanted, rtol=5e-3, atol=5e-3)


def test_cuts_fill_a_gpu_once() -> None:
    for outputs, inputs in [(6144, 4096), (4096, 4096), (4096, 11008), (22016, 4096), (512, 2048)]:
        cut = streamed.shape_for(outputs, inputs)
        programs = -(-outputs // cut.outputs) * cut.splits
        assert inputs // cut.splits >= 1024 and (programs >= 64 or cut.splits > 1)
        tiles = (cut.outputs + streamed.MAX_ROWS) * cut.inputs * 2 * cut.stages
        each = 1 if programs <= 128 else 2  # programs of one processor
        assert tiles * each <= 232448, "more than a processor's shared memory"


@pytest.mark.parametrize("rows", [33, 70, 100])
def test_int8_choices_of_many_rows_are_the_samplers(rows: int) -> None:
    rounded = Int8Rows(layer_of(150, 96))
    x, inv_temps = random(rows, 96, seed=1), torch.zeros(rows, device=DEVICE)
    inv_temps[1::2] = 1.3
    seeds, positions = list(range(-3, rows - 3)), list(range(rows))
    ids = torch.arange(7, 7 + 3 * 150, 3, device=DEVICE)
    where = torch.tensor(seeds, device=DEVICE), torch.tensor(positions, device=DEVICE)
    cut = Shape(outputs=64, inputs=64)
    found = choose_streamed(x, rounded.weight, rounded.scales, inv_temps, *where, ids, cut)
    whole, _, sizes = integers(x)
    near = whole.float() * sizes[:, None]
    logits = near @ (rounded.weight.float() * rounded.scales[:, None]).T
    sums = logits * inv_temps[:, None] + noise.gumbel(seeds, positions, ids)
    sums[inv_temps == 0] = logits[inv_temps == 0]
    assert found.tolist() == ids[sums.argmax(-1)].tolist()


def test_who_chooses_by_how_many_rows() -> None:
    assert chooser_for(random(32, 64)) is choose_int8
    assert chooser_for(random(33, 64)) is choose_streamed
    assert chooser_for(random(128, 64)) is choose_streamed
    assert chooser_for(random(129, 64)) is None
    assert chooser_for(random(33, 72)) is None, "rows of 72 bytes cannot be described"


def test_the_forward_pass_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []

    def spy(name: str, kernel):
        def called(*parts, **more):
            used.append(name)
            return kernel(*parts, **more)

        return called

    for name in ("streamed_linear", "streamed_gated"):
        monkeypatch.setattr(streamed, name, spy(name, getattr(streamed, name)))
    monkeypatch.setattr(int8_choice, "choose_streamed", spy("choose", choose_streamed))
    monkeypatch.setattr(streamed, "takes", lambda x, weight: 17 <= x.shape[0] <= 80)  # fp32, too
    x, layer, kernels = random(40, 64, seed=1), layer_of(80, 64), Kernels()
    plain = x @ layer.weight.T
    torch.testing.assert_close(kernels.product(x, layer).sum(0), plain, rtol=1e-3, atol=1e-3)
    gate, up = plain.chunk(2, -1)
    wanted = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(kernels.gated(x, layer), wanted, rtol=1e-3, atol=1e-3)
    numbers = torch.zeros(40, dtype=torch.int64, device=DEVICE)
    inv_temps = torch.zeros(40, device=DEVICE)
    chosen = kernels.choose(x, with_int8(layer), inv_temps, numbers, numbers)
    assert (chosen == plain.argmax(-1)).float().mean() > 0.9  # both sides are rounded
    assert used == ["streamed_linear", "streamed_gated", "choose"]
    used.clear()
    kernels.product(x[:16], layer), kernels.gated(x[:16], layer)
    assert used == []
