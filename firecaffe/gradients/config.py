"""The recipe's [exchange] section: how gradients travel, and what of them."""

from dataclasses import dataclass
from typing import Literal

from firecaffe.errors import RecipeError
from firecaffe.exchange import NATIVE, find_schedule, parse_hierarchical
from firecaffe.exchange.choose import AUTO

NO_COMPRESSOR = "none"

TIMEOUTS_S = (0.1, 1e6)
"""The range of time-outs: below, ranks could not even meet; above, no system clock can count."""

MOST_LEVEL = 20
"""The highest level: a node of a million micro-batches."""


@dataclass(frozen=True)
class ExchangeConfig:
    """How gradients are summed over the workers.

    Args:
        algorithm: auto takes the fastest by a link that is measured at the start, of those that
            give tree's bits. Or a row of docs/exchange.md: tree, pipelined_tree, double_tree,
            halving_doubling, recursive_doubling, parameter_server, sharded_parameter_server,
            ring, native, or hierarchical(INNER,OUTER).
        compressor: How gradients are encoded on the way: none, float16, bfloat16, int8, one_bit,
            threshold, top_k or power_sgd. All but none change the result.
        compressor_level: The level of the micro-batch tree whose nodes are encoded: 0 encodes every
            micro-batch, 1 every sum of two, 2 of four. Part of the result; and there can be no more
            workers than nodes.
        bucket_bytes: Gradients travel in buckets, each as soon as backward has made it ready. One
            is full once it holds so many bytes; the first, at a quarter of that.
        update_at: Who updates the weights. all: every worker all of them. shards: each worker a
            shard of them, which it then gives to the others; it holds the optimizer's state of
            its shard alone. The result is the same.
        shared_memory: Ranks of one host add in the memory that they share, in tree order, and only
            one of them sends. The result is the same.
        timeout_s: How long a rank waits for the others before it gives up.
        silent_s: After how long without a word (its watch says one a second) a rank is held for
            frozen or cut off.
    """

    algorithm: str = AUTO
    compressor: str = NO_COMPRESSOR
    compressor_level: int = 0
    bucket_bytes: int = 4_000_000
    update_at: Literal["all", "shards"] = "all"
    shared_memory: bool = True
    timeout_s: float = 300.0
    silent_s: float = 20.0

    @property
    def in_shards(self) -> bool:
        """Whether each worker updates a shard of the weights."""
        return self.update_at == "shards"

    @property
    def codec(self) -> str:
        """The compressor; empty if gradients travel as they are."""
        return "" if self.compressor == NO_COMPRESSOR else self.compressor

    @property
    def level(self) -> int:
        """The level of the tree whose nodes are shared out whole; 0 if nothing is encoded."""
        return self.compressor_level if self.codec else 0


def check_exchange(config: ExchangeConfig) -> None:
    """Checks the section. Raises: RecipeError if a word is not possible."""
    # Codecs load torch, which the meaning of a recipe's words does not need.
    from firecaffe.gradients.compressors import COMPRESSORS

    algorithm, compressor = config.algorithm, config.compressor
    if algorithm not in (NATIVE, AUTO):
        try:
            find_schedule(algorithm)
        except ValueError as error:
            also = f", {AUTO}" if parse_hierarchical(algorithm) is None else ""
            raise RecipeError(f"exchange.algorithm: {error}{also}") from None
    if compressor not in (NO_COMPRESSOR, *COMPRESSORS):
        known = ", ".join((NO_COMPRESSOR, *COMPRESSORS))
        raise RecipeError(f"exchange.compressor is {compressor!r}; it must be one of {known}")
    if not 0 <= config.compressor_level <= MOST_LEVEL:
        raise RecipeError(
            f"exchange.compressor_level is {config.compressor_level}; it must be 0 to {MOST_LEVEL}"
        )
    if config.bucket_bytes < 1:
        raise RecipeError(f"exchange.bucket_bytes is {config.bucket_bytes}; it must be at least 1")
    check_timeout("exchange.timeout_s", config.timeout_s)
    check_timeout("exchange.silent_s", config.silent_s)


def check_timeout(word: str, timeout_s: float) -> None:
    """Checks a time-out. Raises: RecipeError if nobody can wait for so long; NaN is no time."""
    least, most = TIMEOUTS_S
    if not least <= timeout_s <= most:
        raise RecipeError(f"{word} is {timeout_s:g}; it must be {least:g} to {most:g} seconds")
