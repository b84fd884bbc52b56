"""What [prune] and [share] ask of other words."""

from firecaffe.compression.config import MAGNITUDE, PruneConfig, ShareConfig
from firecaffe.errors import RecipeError
from firecaffe.gradients.config import ExchangeConfig
from firecaffe.parallel.config import ParallelConfig
from firecaffe.synchrony.config import EVERY_STEP, SynchronyConfig


def check_constrained(
    prune: PruneConfig,
    share: ShareConfig,
    exchange: ExchangeConfig,
    synchrony: SynchronyConfig,
    parallel: ParallelConfig,
) -> None:
    """Raises: RecipeError if another word cannot be had with masks or shared weights."""
    if not prune.is_on and not share.is_on:
        return
    word = "prune" if prune.is_on else "share"
    found = {
        f"synchrony.mode {synchrony.mode}, in which weights differ among workers": synchrony.mode
        != EVERY_STEP,
        "exchange.update_at shards, in which no worker has all of a layer": exchange.in_shards,
        f"{parallel.word}, by which no worker has all layers": parallel.is_split
        or bool(parallel.stages),
    }
    wrong = next((each for each, is_wrong in found.items() if is_wrong), "")
    if wrong:
        raise RecipeError(f"[{word}] with {wrong}: not possible; leave one of them out")
    if prune.is_on and share.is_on and prune.how != MAGNITUDE:
        raise RecipeError(
            f"prune.how {prune.how} with share.bits: weights that share a value are chosen at the "
            "start, when those that are pruned are not known yet; share in a training that begins "
            "with the pruned weights (model.weights)"
        )


def prune_notes(words: PruneConfig, steps: int) -> list[str]:
    """Notes for people on a training of so many steps that ends before its masks are final."""
    if not words.is_on or words.how == MAGNITUDE or words.steps <= steps:
        return []
    return [
        f"warning: prune.steps is {words.steps}, the training ends after {steps}, when weights are "
        "still being pruned"
    ]
