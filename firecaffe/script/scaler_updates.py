"""Callbacks after each update of a GradScaler, which has no hooks."""

from collections.abc import Callable
from typing import Any

from torch.amp.grad_scaler import GradScaler


class CountedUpdate:
    def __init__(self, update: Callable[..., None]) -> None:
        self._update = update
        self.calls: list[Callable[[], None]] = []

    def __call__(self, *arguments: Any, **words: Any) -> None:
        self._update(*arguments, **words)
        for call in list(self.calls):
            call()


def after_each_update(scaler: GradScaler, call: Callable[[], None]) -> Callable[[], None]:
    """Run `call` after each `update` of a scaler, and return a function that ends this."""
    if not isinstance(scaler.update, CountedUpdate):
        scaler.update = CountedUpdate(scaler.update)  # type: ignore[method-assign]
    calls = scaler.update.calls
    calls.append(call)

    def end() -> None:
        if call in calls:
            calls.remove(call)

    return end
