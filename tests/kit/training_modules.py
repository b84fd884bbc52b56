"""Small modules whose forward is a function."""

from collections.abc import Callable
from typing import Any

from torch import nn


class Composed(nn.Module):
    """Composed(lambda m, x: m.last(m.first(x)), first=nn.Linear(2, 3), last=nn.Linear(3, 2))."""

    def __init__(self, forward: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self._forward = forward
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, *inputs: Any, **words: Any) -> Any:
        return self._forward(self, *inputs, **words)
