"""What exchange.update_at shards asks of other words."""

from firecaffe.errors import RecipeError
from firecaffe.exchange.choose import AUTO
from firecaffe.exchange.order import keeps_tree_order
from firecaffe.gradients.config import ExchangeConfig
from firecaffe.parallel.config import ParallelConfig
from firecaffe.recipe.config import TrainConfig
from firecaffe.solvers.config import BY_ELEMENT, BY_LAYER, SolverConfig
from firecaffe.synchrony.config import EVERY_STEP, SynchronyConfig


def needs_norms(solver: SolverConfig) -> bool:
    """Whether an update needs norms of whole parameters, so that each has one owner."""
    return bool(solver.clip_gradients) or solver.type not in BY_ELEMENT


def check_update_at(
    words: ExchangeConfig,
    train: TrainConfig,
    solver: SolverConfig,
    synchrony: SynchronyConfig,
    parallel: ParallelConfig,
) -> None:
    """Raises: RecipeError if another word cannot be had with an update in shards."""
    if not words.in_shards:
        return
    keeps_order = words.algorithm == AUTO or keeps_tree_order(words.algorithm)
    found = {
        f"exchange.algorithm {words.algorithm}, which does not add in the order of the "
        "micro-batch tree": not keeps_order,
        f"exchange.compressor {words.compressor}": bool(words.codec),
        f"synchrony.mode {synchrony.mode}": synchrony.mode != EVERY_STEP,
        "parallel.stages": bool(parallel.stages),
        "parallel.split": bool(parallel.split),
        f"parallel.scheme {parallel.scheme}": parallel.is_split,
        "train.autocast float16, whose loss scale all would have to agree on": train.autocast
        == "float16",
        "train.batch_norm_samples": bool(train.batch_norm_samples),
    }
    wrong = next((each for each, is_wrong in found.items() if is_wrong), "")
    would = "leave it out, or exchange.update_at"
    if not wrong and solver.type not in BY_LAYER:
        wrong = f"solver.type {solver.type}"
        would = f"{', '.join(BY_LAYER)} update each parameter by itself"
    elif wrong and not keeps_order:
        would = "use tree"
    if wrong:
        raise RecipeError(f"exchange.update_at shards with {wrong}: not possible; {would}")
