"""How much K/V memory an engine takes: from what is free, or as told."""

from __future__ import annotations

import os

import torch

from headstart.assembly.build import Built
from headstart.engine.options import EngineOptions
from headstart.errors import EngineError


def num_blocks(built: Built, options: EngineOptions) -> tuple[int, int]:
    """How many K/V blocks there is memory for, and the bytes of one."""
    config = built.config
    layers = config.num_layers + (built.head.num_modules if built.head else 0)
    token = 2 * config.num_kv_heads * config.head_dim * built.dtype.itemsize * layers
    states = (built.head.num_modules if built.head else 0) * config.hidden * built.dtype.itemsize
    block = token * options.block_size + states
    budget = options.kv_bytes or int(_free_bytes(built.device) * options.memory_fraction)
    # More than all requests at full length could ever hold is of no use; a request keeps a slot
    # for the token that its last row gives.
    most = options.max_running_requests * -(-(built.max_len + 1) // options.block_size)
    count = min(budget // block, most)
    if count < 1:
        raise EngineError(
            f"one K/V block needs {block:,} bytes and there are {budget:,}. Raise kv_bytes or "
            "memory_fraction, or lower block_size."
        )
    return int(count), block


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
