"""The recipe's [model] section."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelConfig:
    """The network.

    Args:
        name: A network of docs/models.
    """

    name: str = "nin_small"
