"""Few rows of experts with tiles and without; for gpu_moe.py."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from graph_timing import device_name, seconds
from moe_layers import ALONE, BY_TILES, Layer, batches, chosen_by, needed_bytes, weights_of

from headstart.backends.cuda.experts import bytes_read_again, is_without_tiles
from headstart.backends.cuda.kernels.group_experts import GroupExperts
from headstart.models.feed_forward import MoE


def measure_ways(block: MoE, layer: Layer, rows: int) -> dict[str, Any]:
    """Microseconds of the experts' products without tiles and with them."""
    all_x, weights = batches(block, layer, rows), weights_of(block)
    known = chosen_by(block, all_x)
    choices = known[0][1].shape[1]
    touched = statistics.mean(needed_bytes(block, layer, x)[1] for x in all_x)
    assert not isinstance(weights, GroupExperts), "there is one way for groups"
    vector = seconds([partial(ALONE[type(weights)][0], *k, weights) for k in known])
    tiles = seconds([partial(BY_TILES[type(weights)][0], *k, weights) for k in known])
    return {
        "rows": rows, "choices": rows * choices, "experts": touched + weights.num_shared,
        "read_again_mb": bytes_read_again(rows, choices, weights) / 1e6, "vector_us": vector * 1e6,
        "tiles_us": tiles * 1e6, "vector_to_tiles": vector / tiles,
        "chosen": "vector" if is_without_tiles(rows, choices, weights) else "tiles",
    }  # fmt: skip


def compare_ways(block: MoE, layer: Layer, all_rows: Sequence[int], shape: str) -> None:
    print("rows choices experts  MB read again  vector    tiles  ratio")
    found = [measure_ways(block, layer, rows) for rows in all_rows]
    for one in found:
        print("{rows:4d} {choices:7d} {experts:7.1f} {read_again_mb:14.1f} {vector_us:7.1f} "
              "{tiles_us:8.1f} {vector_to_tiles:6.2f}  {chosen}".format(**one))  # fmt: skip
    experts = layer.config.num_experts
    print(json.dumps({"device": device_name(), "torch": torch.__version__, "shape": shape,
                      "num_experts": experts, "ways": found}))  # fmt: skip
