"""One digest of the losses of all steps."""

import hashlib
import math
from dataclasses import dataclass


@dataclass
class Losses:
    """The history of losses that a training carries; all ranks hold it alike."""

    history: str = ""
    """The digest of all losses so far; empty before the first."""

    def add(self, loss: float) -> None:
        """Extends the history by a step's loss."""
        self.history = extend_history(self.history, loss)


def extend_history(history: str, loss: float) -> str:
    """The digest of all losses so far: SHA-256 of the one before and the loss's exact value."""
    exact = loss.hex() if math.isfinite(loss) else repr(loss)
    return hashlib.sha256(f"{history} {exact}".encode()).hexdigest()
