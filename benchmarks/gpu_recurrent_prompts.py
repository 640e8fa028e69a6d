"""Prompts through a gated delta net on a GPU: our chunks beside flash-linear-attention.

PYTHONPATH=.:FOLDER python3 benchmarks/gpu_recurrent_prompts.py   (fla-core and einops in FOLDER)

A layer of Qwen3-Next's size with random weights. First what the start costs: the import, and the
trial, in which the library compiles and tunes itself (much less once Triton has it on disk). Then
for each case the rule alone and the whole layer, median of some passes with the time of the host
in it: that is what our chunks spend. Differences are those of whole layers. The last line is one
JSON document. Without a GPU all is tiny, and says only that it runs.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import accumulate, pairwise
from typing import Any

import torch
from graph_timing import DEVICE, device_name, wall
from torch import Tensor

from headstart.backends.cuda.fla import FlaScan, try_library
from headstart.backends.cuda.recurrent import ragged_recur
from headstart.models.delta_config import DeltaConfig
from headstart.models.delta_rule import DeltaRows, Scan, scan_texts
from headstart.models.linear_attention import DeltaNet
from headstart.models.recurrence import LayerStates, StateSpan, empty_states

IS_GPU = DEVICE.type == "cuda"
DTYPE = torch.bfloat16 if IS_GPU else torch.float32
HIDDEN = 2048 if IS_GPU else 32
CONFIG = (
    DeltaConfig(k_heads=16, v_heads=32, k_dim=128, v_dim=128, kernel=4)
    if IS_GPU
    else DeltaConfig(k_heads=1, v_heads=2, k_dim=16, v_dim=16, kernel=4)
)
SCALE = 1 if IS_GPU else 50  # of all lengths
BLOCK = 16  # rows; the state after the last whole one is kept, as for a prefix hit
# rows of a pass by request, and whether states before the last are kept
CASES: dict[str, tuple[list[int], bool]] = {
    "24": ([24], False),
    "64": ([64], False),
    "128": ([128], False),
    "512": ([512], False),
    "2500": ([2500], False),
    "8192": ([8192], False),
    "4 x 2500": ([2500] * 4, False),
    "4 x 2500, two states": ([2500] * 4, True),
}
_UNCOUNTED, _PASSES = 2, 7


def make_net() -> DeltaNet:
    with torch.device(DEVICE):
        net = DeltaNet(HIDDEN, CONFIG, 1e-6)
    for value in net.parameters():
        value.data.normal_(0, HIDDEN**-0.5)
    return net.to(DTYPE)


def make_spans(rows: list[int], has_snapshots: bool) -> list[StateSpan]:
    """Texts from their beginning: text i leaves its state in slot 2 i, its snapshot in the next."""
    result = []
    for text, (start, stop) in enumerate(pairwise(accumulate(rows, initial=0))):
        keeps = [(stop - start, 2 * text)]
        if has_snapshots:
            keeps.insert(0, ((stop - start - 1) // BLOCK * BLOCK, 2 * text + 1))
        result.append(StateSpan(start, stop, None, tuple(keeps)))
    return result


def random_texts(rows: list[int]) -> tuple[list[DeltaRows], list[Tensor]]:
    """What a layer hands to the rule, and memories."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE)

    heads, k_dim, v_dim = CONFIG.v_heads, CONFIG.k_dim, CONFIG.v_dim
    texts = [
        DeltaRows(
            torch.nn.functional.normalize(normal(count, heads, k_dim), dim=-1) * k_dim**-0.5,
            torch.nn.functional.normalize(normal(count, heads, k_dim), dim=-1),
            normal(count, heads, v_dim),
            -(normal(count, heads) - 3).exp(),
            normal(count, heads).sigmoid(),
        )
        for count in rows
    ]
    return texts, [normal(heads, k_dim, v_dim) for _ in rows]


def median_ms(run: Callable[[], Any]) -> float:
    times = [wall(run) for _ in range(_UNCOUNTED + _PASSES)]
    return statistics.median(times[_UNCOUNTED:]) * 1e3


def read(net: DeltaNet, x: Tensor, spans: list[StateSpan], scan: Scan) -> tuple[Tensor, Tensor]:
    """What the layer gives, and the memories after it."""
    states: LayerStates = empty_states(CONFIG, 2 * len(spans), DTYPE, DEVICE)
    return ragged_recur([states], spans, scan)(net, 0, x).squeeze(0), states.memory


def gaps(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Largest difference over the largest value, and norm of differences over the norm."""
    difference = found.float() - wanted.float()
    largest = difference.abs().max() / wanted.float().abs().max()
    return float(largest), float(difference.norm() / wanted.float().norm())


def measure(net: DeltaNet, case: str, library: Scan) -> dict[str, Any]:
    whole, has_snapshots = CASES[case]
    rows = [-(-count // SCALE) for count in whole]
    spans = make_spans(rows, has_snapshots)
    x = torch.randn(sum(rows), HIDDEN, device=DEVICE, dtype=DTYPE)
    wanted, found = read(net, x, spans, scan_texts), read(net, x, spans, library)
    largest, norm = gaps(found[0], wanted[0])
    result: dict[str, Any] = {
        "case": case, "rows": sum(rows), "largest": largest, "norm": norm,
        "states_norm": gaps(found[1], wanted[1])[1],
    }  # fmt: skip
    texts = random_texts(rows)
    for name, scan in (("ours", scan_texts), ("fla", library)):
        alone = scan.run if isinstance(scan, FlaScan) else scan  # however few rows there are
        result[f"rule_{name}_ms"] = median_ms(partial(alone, *texts))
        result[f"layer_{name}_ms"] = median_ms(partial(read, net, x, spans, scan))
    result["rule_ratio"] = result["rule_ours_ms"] / result["rule_fla_ms"]
    result["layer_ratio"] = result["layer_ours_ms"] / result["layer_fla_ms"]
    return result


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    print(device_name(), "torch", torch.__version__)
    started = time.perf_counter()
    try:
        version = import_module("fla").__version__
        import_module("fla.ops.gated_delta_rule")
    except Exception as error:  # told by the note below
        version = f"none ({type(error).__name__})"
    imported, started = time.perf_counter() - started, time.perf_counter()
    library, note = try_library(CONFIG, DTYPE, DEVICE)
    tried = time.perf_counter() - started
    print(f"fla {version}: import {imported:.1f} s, trial {tried:.1f} s\n{note}")
    if IS_GPU and not isinstance(library, FlaScan):
        raise SystemExit("the library was not taken: nothing to compare")
    net, results = make_net(), []
    print(f"{'case':22} {'rule ms':>17} {'times':>6} {'layer ms':>17} {'times':>6}  differences")
    line = (
        "{case:22} {rule_ours_ms:8.2f} {rule_fla_ms:8.2f} {rule_ratio:6.1f} {layer_ours_ms:8.2f} "
        "{layer_fla_ms:8.2f} {layer_ratio:6.1f}  {largest:.4f} largest, {norm:.4f} norm, "
        "{states_norm:.4f} states"
    )
    for case in CASES:
        results.append(measure(net, case, library))
        print(line.format(**results[-1]), flush=True)
    trouble = library.trouble if isinstance(library, FlaScan) else note
    document = {"device": device_name(), "torch": torch.__version__, "fla": version,
                "import_s": imported, "trial_s": tried, "trouble": trouble,
                "cases": results}  # fmt: skip
    print(json.dumps(document))


if __name__ == "__main__":
    main()
