"""Numbers from the host to the device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def on_device(
    values: Sequence[int] | Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """A tensor of `values` on the device, ready for whatever is launched after this.

    A copy from ordinary memory would first wait for everything that the device has to do; from
    pinned memory it takes its place in the queue.
    """
    made = torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return made.to(device)
    return made.pin_memory().to(device, non_blocking=True)
