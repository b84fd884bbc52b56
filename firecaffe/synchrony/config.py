"""The recipe's [synchrony] section: when workers exchange, and who computes what."""

from dataclasses import dataclass

from firecaffe.errors import RecipeError

EVERY_STEP = "every_step"

MODES = {
    EVERY_STEP: "all micro-batches of a step are added, then comes one update",
}
"""The modes of docs/synchrony.md, for people."""


@dataclass(frozen=True)
class SynchronyConfig:
    """When workers exchange, and who computes what.

    Args:
        mode: A row of docs/synchrony.md: every_step.
    """

    mode: str = EVERY_STEP


def check_synchrony(config: SynchronyConfig) -> None:
    """Checks the section. Raises: RecipeError if a word, or two together, are not possible."""
    if config.mode not in MODES:
        known = ", ".join(MODES)
        raise RecipeError(f"synchrony.mode is {config.mode!r}; it must be one of {known}")
