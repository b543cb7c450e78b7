"""One kernel launch as a value: the launchers run it, tests compile the same thing without a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`, and at least 1."""
    return 1 << max(number - 1, 0).bit_length()


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with its grid, its arguments in order, and its compile-time constants and launch options by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[torch.Tensor | int | float, ...]
    constants: dict[str, int]

    def run(self) -> None:
        """Launch, compiling first if nothing like it was compiled before."""
        self.kernel[self.grid](*self.arguments, **self.constants)

    def compile(self) -> Any:
        """Compile what `run` would launch, launch nothing, and return Triton's compiled kernel."""
        return self.kernel.warmup(*self.arguments, grid=self.grid, **self.constants)
