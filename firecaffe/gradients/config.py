"""The recipe's [exchange] section: how gradients are exchanged and encoded."""

from dataclasses import dataclass
from math import inf
from typing import Literal

from firecaffe.errors import RecipeError
from firecaffe.exchange import AUTO, EXCHANGES, find_schedule, parse_hierarchical, unknown_exchange
from firecaffe.value_checks import check_choice, check_limits

NO_COMPRESSOR = "none"

ALL: Literal["all"] = "all"
SHARDS: Literal["shards"] = "shards"

TIMEOUTS_S = (0.1, 1e6)
"""The range of time-outs. Ranks cannot connect in less; no system clock can count more."""

MAX_LEVEL = 20
"""The highest `compressor_level`: a node of this level sums a million micro-batches."""


@dataclass(frozen=True)
class ExchangeConfig:
    """How gradients are summed over the workers.

    Args:
        algorithm: auto measures a link at the start and chooses the fastest of the algorithms that
            give tree's bits. Or one by name (docs/explanation/exchange.md): tree, pipelined_tree,
            double_tree, halving_doubling, recursive_doubling, parameter_server,
            sharded_parameter_server, ring, native, or hierarchical(INNER,OUTER).
        compressor: How gradients are encoded on the way: none, float16, bfloat16, int8, one_bit,
            threshold, top_k or power_sgd. All but none change the result.
        compressor_level: The level of the micro-batch tree whose nodes are encoded: 0 encodes every
            micro-batch, 1 every sum of two, 2 of four. It changes the result. There can be no
            more workers than nodes.
        bucket_bytes: Gradients travel in buckets, each as soon as backward has finished it. One is
            full when it holds this many bytes; the first, at a quarter of that.
        update_at: Which worker updates which weights. all: every worker all of them. shards: each
            worker a shard, which it sends to the others; it holds the optimizer's state of its
            shard only. The result is the same.
        shared_memory: Ranks of one host add in shared memory, in tree order, and only one of them
            sends. The result is the same.
        timeout_s: Seconds that a rank waits for the others before it gives up.
        silent_s: Seconds of silence after which a rank counts as frozen or cut off. Its watch
            sends one sign of life a second.
    """

    algorithm: str = AUTO
    compressor: str = NO_COMPRESSOR
    compressor_level: int = 0
    bucket_bytes: int = 4_000_000
    update_at: Literal["all", "shards"] = ALL
    shared_memory: bool = True
    timeout_s: float = 300.0
    silent_s: float = 20.0

    @property
    def in_shards(self) -> bool:
        """Whether each worker updates a shard of the weights."""
        return self.update_at == SHARDS

    @property
    def codec(self) -> str:
        """The compressor; empty if gradients travel as they are."""
        return "" if self.compressor == NO_COMPRESSOR else self.compressor

    @property
    def level(self) -> int:
        """The level of the tree whose nodes are encoded whole; 0 without a compressor."""
        return self.compressor_level if self.codec else 0


def check_exchange(config: ExchangeConfig) -> None:
    # Codecs import torch, which reading a recipe does not need.
    from firecaffe.gradients.compressors import COMPRESSORS

    algorithm = config.algorithm
    if parse_hierarchical(algorithm) is not None:
        try:
            find_schedule(algorithm)
        except ValueError as error:
            raise RecipeError(f"exchange.algorithm: {error}") from None
    elif algorithm not in (*EXCHANGES, AUTO):
        raise RecipeError(f"exchange.algorithm: {unknown_exchange(algorithm, AUTO)}")
    check_choice("exchange.compressor", config.compressor, (NO_COMPRESSOR, *COMPRESSORS))
    limits = {"compressor_level": (0, MAX_LEVEL), "bucket_bytes": (1, inf)}
    check_limits("exchange", config, limits)
    check_timeout("exchange.timeout_s", config.timeout_s)
    check_timeout("exchange.silent_s", config.silent_s)


def check_timeout(word: str, timeout_s: float) -> None:
    least, most = TIMEOUTS_S
    if not least <= timeout_s <= most:
        raise RecipeError(f"{word} is {timeout_s:g}; it must be {least:g} to {most:g} seconds")
