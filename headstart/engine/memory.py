"""How much K/V memory an engine takes: as told, or enough for its requests within what is free."""

from __future__ import annotations

import torch

from headstart.assembly.build import Built
from headstart.assembly.host import available_bytes
from headstart.engine.options import EngineOptions
from headstart.errors import EngineError
from headstart.models.config import ModelConfig

_GPU_SHARE = 0.5
# On a CPU memory is everybody's: enough for requests of usual length, and not more than this
# unless one request of full length needs it or the user asks.
_USUAL_TOKENS = 2048
_CPU_BYTES = 1 << 30
_MOST_OF_FREE = 0.8


def num_blocks(built: Built, options: EngineOptions) -> tuple[int, int]:
    """How many K/V blocks there is memory for, and the bytes of one."""
    block = block_bytes(built, options.block_size)
    # A request keeps a slot for the token that its last row gives. More than all requests at full
    # length could ever hold is of no use.
    full = -(-(built.max_len + 1) // options.block_size)
    most = options.max_running_requests * full
    budget = _budget(built, options, block, full)
    count = min(budget // block, most)
    if count < 1:
        raise EngineError(
            f"one K/V block needs {block:,} bytes and there are {budget:,}. Raise kv_bytes or "
            "memory_fraction, or lower block_size."
        )
    return int(count), block


def block_bytes(built: Built, block_size: int) -> int:
    """K/V of a block in every layer of trunk and head, and the states kept beside it."""
    token = built.config.num_layers * _slot_values(built.config)
    states = 0
    if built.head is not None:
        token += built.head.num_modules * _slot_values(built.head.config)
        states = built.head.num_modules * built.config.hidden
    return (token * block_size + states) * built.dtype.itemsize


def _slot_values(config: ModelConfig) -> int:
    return 2 * config.num_kv_heads * config.head_dim


def _budget(built: Built, options: EngineOptions, block: int, full: int) -> int:
    if options.kv_bytes is not None:
        return options.kv_bytes
    free = _free_bytes(built.device)
    share = options.memory_fraction
    if share is None and built.device.type != "cpu":
        share = _GPU_SHARE
    if share is not None:
        return int(free * share)
    usual = min(full, -(-_USUAL_TOKENS // options.block_size)) * options.max_running_requests
    wanted = max(min(usual * block, _CPU_BYTES), full * block)
    return min(wanted, int(free * _MOST_OF_FREE))


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()
