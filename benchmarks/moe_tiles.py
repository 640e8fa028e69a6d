"""Tiles of up to 64 and of up to 128 pairs for many rows of experts; for gpu_moe.py."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

from graph_timing import device_name
from moe_layers import Layer, check

from headstart.backends.cuda.kernels import moe as kernels
from headstart.models.feed_forward import MoE

_TURNS = 3
MOST = (64, 128)
Measure = Callable[[MoE, Layer, int], dict[str, Any]]


def compare_tiles(block: MoE, layer: Layer, all_rows: Sequence[int], measure: Measure) -> None:
    """The layer with either, in turns; first each is checked against the plain module."""
    print(" rows   MB read    floor " + "".join(f"{most:>9} pairs" for most in MOST) + "  ratio")
    results = []
    for rows in all_rows:
        found: dict[int, list[dict[str, Any]]] = {most: [] for most in MOST}
        for turn in range(_TURNS):
            for most in MOST:
                with patch.object(kernels, "most_pairs", lambda *_, most=most: most):
                    if turn == 0:
                        check(block, block, layer, rows, "as-dtype")
                    found[most].append(measure(block, layer, rows))
        us = {most: statistics.median(one["us"] for one in own) for most, own in found.items()}
        floor = statistics.median(one["floor_us"] for own in found.values() for one in own)
        results.append({"rows": rows, "floor_us": floor, "us": us})
        shown = "".join(f"{us[most]:9.1f} ({us[most] / floor:.2f})" for most in MOST)
        megabytes = found[MOST[0]][0]["megabytes"]
        print(
            f"{rows:5d} {megabytes:9.1f} {floor:8.1f} {shown} {us[64] / us[128]:6.2f}", flush=True
        )
    print(json.dumps({"device": device_name(), "tiles": results}))
