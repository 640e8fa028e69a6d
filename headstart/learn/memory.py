"""What a learner needs of its device's memory: so much of it is taken before a server sizes K/V."""

from __future__ import annotations

import os

import numpy as np
import torch

from headstart.backends.host import available_bytes
from headstart.data.records import Record
from headstart.train.packing import Row

_STATE_BYTES = 1 << 30
_STATE_SHARE = 0.25  # of what is free: on small machines the server needs the rest


def state_bytes(device: torch.device) -> int:
    """Memory for states of texts: at most 1 GB, and a quarter of what is free."""
    free = available_bytes()
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    return min(_STATE_BYTES, int(free * _STATE_SHARE))


def held_bytes(device: torch.device) -> int:
    """What this process holds of a GPU, with what its allocator keeps; on a CPU of the system."""
    if device.type == "cuda":
        return int(torch.cuda.memory_reserved(device))
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def blank_row(num_tokens: int, longest: int) -> Row:
    """A row of at least one text and about so many tokens, in texts that are as long as may be:
    all of them to learn."""
    longest = min(longest, num_tokens)
    record = Record(
        id="blank", prompt_id="", category="", turn=0, sample=0,
        ids=np.zeros(longest, np.int32), mask=np.ones(longest, np.bool_), seed=None, sampling={},
        finish_reason="length", exact_ids=False, num_prompt=0,
    )  # fmt: skip
    return Row((record,) * (num_tokens // longest))
