"""The recipe's [synchrony] section: when workers exchange, and who computes what."""

from dataclasses import dataclass
from typing import Literal

from firecaffe.errors import RecipeError

EVERY_STEP = "every_step"

EQUAL: Literal["equal"] = "equal"
MEASURED: Literal["measured"] = "measured"

MODES = {
    EVERY_STEP: "all micro-batches of a step are added, then comes one update",
}
"""The modes of docs/synchrony.md, for people."""


@dataclass(frozen=True)
class SynchronyConfig:
    """When workers exchange, and who computes what.

    Args:
        mode: A row of docs/synchrony.md: every_step.
        shares: How many micro-batches of a step each worker computes: equal, or measured, as many
            as it computes in the same time as the others. The result is the same.
        shares_every: The number of steps between two decisions about measured shares.
    """

    mode: str = EVERY_STEP
    shares: Literal["equal", "measured"] = EQUAL
    shares_every: int = 10


def check_synchrony(config: SynchronyConfig) -> None:
    """Checks the section. Raises: RecipeError if a word, or two together, are not possible."""
    if config.mode not in MODES:
        known = ", ".join(MODES)
        raise RecipeError(f"synchrony.mode is {config.mode!r}; it must be one of {known}")
    if config.shares_every < 1:
        raise RecipeError(f"synchrony.shares_every is {config.shares_every}; it must be at least 1")
