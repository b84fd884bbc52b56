"""What rows of the table of refusals ask of words, where several ask the same."""

from firecaffe.data.config import IMAGE_WORDS
from firecaffe.exchange.choose import AUTO as AUTO_EXCHANGE
from firecaffe.exchange.order import keeps_tree_order
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.parallel.config import AUTO, ONE_WEIRD_TRICK
from firecaffe.recipe.terms import Kind, any_of, is_, is_not, off, on
from firecaffe.reference import is_caffe, is_reference
from firecaffe.synchrony.config import (
    ASYNCHRONOUS,
    EVERY_STEP,
    LOCAL,
    MEASURED,
    NO_LOCK,
    SERVED,
    SHARDED,
    STALE,
)

OWN_CODE = Kind("code of your own", is_reference)
CAFFES_NET = Kind("caffe:PATH", is_caffe)


def _leaves_the_tree(algorithm: str) -> bool:
    return algorithm != AUTO_EXCHANGE and not keeps_tree_order(algorithm)


OUT_OF_ORDER = Kind("one that leaves the tree's order", _leaves_the_tree)


def _needs_all(compressor: str) -> bool:
    # Codecs load torch, which the meaning of a recipe's words does not need.
    from firecaffe.gradients.compressors import ONE_BY_ONE

    return compressor not in (NO_COMPRESSOR, *ONE_BY_ONE)


def _keeps_back(compressor: str) -> bool:
    from firecaffe.gradients.compressors import MEMORYLESS

    return compressor not in (NO_COMPRESSOR, *MEMORYLESS)


OF_MANY_LENGTHS = Kind("threshold or power_sgd", _needs_all)
KEEPING_BACK = Kind("a codec that keeps something back", _keeps_back)

CODEC = on("exchange.compressor")
FLOAT16 = is_("train.autocast", "float16")
CLIPPED = on("solver.clip_gradients")
SHARES = is_("synchrony.shares", MEASURED)
BY_SERVER = is_("synchrony.mode", *SERVED)
LATE = is_("synchrony.mode", STALE, ASYNCHRONOUS)
IN_REPLICAS = is_("synchrony.mode", LOCAL)
NOT_EVERY_STEP = is_not("synchrony.mode", EVERY_STEP)
SHARDED_SERVER = (is_("synchrony.server", SHARDED), BY_SERVER)
LOCKLESS = (is_("synchrony.lock", NO_LOCK), is_("synchrony.mode", ASYNCHRONOUS))
SIMULATED = (is_("synchrony.clock", "simulated"), BY_SERVER)
IN_SHARDS = is_("exchange.update_at", "shards")
SPLIT = any_of(on("parallel.split"), is_("parallel.scheme", ONE_WEIRD_TRICK, AUTO))
ROW = any_of(*SPLIT.terms, on("parallel.stages"))
UNSPLIT = (off("parallel.split"), off("parallel.scheme"))
CONSTRAINED = any_of(on("prune.keep"), on("prune.threshold"), on("share.bits"))
TRANSFORMS = tuple(on(f"data.{word}") for word in IMAGE_WORDS)
OWN_SOLVER = is_("solver.type", OWN_CODE)
