"""The recipe's [exchange] section: how gradients travel, never what they come to."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ExchangeConfig:
    """How gradients are summed over the workers.

    Args:
        algorithm: A row of docs/exchange.md: tree, halving_doubling, recursive_doubling,
            parameter_server, sharded_parameter_server, ring or native.
        bucket_bytes: Gradients travel in buckets of about this many bytes, each as soon as
            backward has made it ready.
        timeout_s: How long a rank waits for the others before it gives up.
    """

    algorithm: str = "tree"
    bucket_bytes: int = 4_000_000
    timeout_s: float = 300.0
