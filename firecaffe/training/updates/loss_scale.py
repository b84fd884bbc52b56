"""The loss scale of float16: all ranks of a model skip a step if one has a non-finite gradient."""

from typing import Any, Self

import torch
from torch import Tensor, optim


class LossScale:
    """Wraps torch's `GradScaler` so that ranks agree, as torch's `ShardedGradScaler` does."""

    def __init__(
        self, scaler: torch.amp.GradScaler, optimizer: optim.Optimizer, device: torch.device
    ) -> None:
        self._scaler, self._optimizer, self._device = scaler, optimizer, device
        if self.is_on:
            scaler.scale(torch.zeros((), device=device))  # a rank may have no loss

    def of(self, optimizer: optim.Optimizer) -> Self:
        """Return the same scale for another optimizer."""
        return type(self)(self._scaler, optimizer, self._device)

    @property
    def is_on(self) -> bool:
        return self._scaler.is_enabled()

    @property
    def factor(self) -> Tensor | None:
        if not self.is_on:
            return None
        factor: Tensor = self._scaler.scale(torch.ones((), device=self._device))
        return factor

    def undo(self) -> None:
        """Divide the gradients by the scale."""
        self._scaler.unscale_(self._optimizer)

    @property
    def has_overflowed(self) -> bool:
        """Whether a gradient of this rank was not finite."""
        return self.is_on and any(flag.item() for flag in self._found.values())

    def agree(self, has_overflowed: bool) -> None:
        """Set whether a gradient of any rank was not finite."""
        if self.is_on:
            # Set even on a rank that has no gradient at all.
            self._found[self._device] = torch.tensor(float(has_overflowed), device=self._device)

    def step(self) -> bool:
        """Update the weights and the scale; return False if a gradient has overflowed."""
        updates = not self.has_overflowed
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return updates

    @property
    def _found(self) -> dict[Any, Tensor]:
        by_device: dict[Any, Tensor] = self._scaler._found_inf_per_device(self._optimizer)
        return by_device
