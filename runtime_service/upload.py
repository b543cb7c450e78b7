"""Small host arrays on their way to the device, now and then; what every step copies goes through `staging`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def upload(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array on the device, valid for later work on the current stream; on the CPU a view of it.

    A copy from ordinary memory would wait for everything the stream has still to do. Pinned memory does not, and torch's
    allocator for it gives a block out again only when the copy from it has run.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
