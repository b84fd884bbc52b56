"""The table of refusals: which settings of a recipe cannot be combined, and why; a row per reason.

The check, `firecaffe help`, the reference, the layouts of `auto` and the search of `tune` use it,
and a test makes an example of each row. Single settings are checked by their Config, numbers that
have to fit by `fits`.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from firecaffe.compression.config import GRADUAL, LAYER, MAGNITUDE
from firecaffe.errors import RecipeError
from firecaffe.parallel.config import AUTO, ONE_WEIRD_TRICK
from firecaffe.recipe.refusals_of_modes import OF_REPLICAS, OF_SERVERS
from firecaffe.recipe.sections import Recipe
from firecaffe.recipe.terms import (
    CAFFES_NET,
    CODEC,
    IN_REPLICAS,
    IN_SHARDS,
    NOT_EVERY_STEP,
    OUT_OF_ORDER,
    OWN_SOLVER,
    ROW,
    SHARDED_SERVER,
    SHARES,
    TRANSFORMS,
    Facts,
    Refusal,
    any_of,
    combinations,
    facts_of,
    is_,
    is_not,
    off,
    on,
)
from firecaffe.solvers.config import BY_LAYER, MAY_DECOUPLE, MAY_L1, OF_CAFFE

_DATA = (
    Refusal(
        (any_of(on("data.hold_out"), on("data.balance")), is_("data.order", "shards")),
        "what is left of a shard, or drawn by weights, does not lie together",
        "take data.order = samples",
    ),
    Refusal(
        (any_of(*TRANSFORMS), is_("data.name", CAFFES_NET)),
        "the transform_param of the net's data layers decides",
        "leave the word out",
    ),
)

_EXCHANGE = (
    Refusal(
        (any_of(CODEC, SHARES, IN_SHARDS), is_("exchange.algorithm", OUT_OF_ORDER)),
        "sums take the order of the micro-batch tree, which this exchange does not keep",
        "use tree",
    ),
    Refusal(
        (on("comm_hook"), any_of(NOT_EVERY_STEP, SHARES, IN_SHARDS, *ROW.terms, CODEC)),
        "a hook takes each worker's gradient of a step, whole and as it is, and gives all workers "
        "their sum",
    ),
)

_SHARDS = (
    Refusal(
        (IN_SHARDS, NOT_EVERY_STEP),
        "in other modes there is no sum of a step over workers that they could share out",
        "take synchrony.mode = every_step, or leave exchange.update_at out",
    ),
    Refusal(
        (IN_SHARDS, OWN_SOLVER),
        "an optimizer of your own may need what other workers have",
        f"{', '.join(BY_LAYER)} update each parameter by itself",
    ),
)

_PARALLEL = (
    Refusal(
        (ROW, is_("train.compile", True)),
        "code that is compiled for a part need not round as that of the whole",
    ),
    Refusal(
        (ROW, OWN_SOLVER),
        "an optimizer of your own may need what other workers have",
        "take one by name",
    ),
    Refusal(
        (on("parallel.stages"), is_("parallel.scheme", ONE_WEIRD_TRICK)),
        "a stage takes what the one before it gives, and here each worker has its own samples",
        'say parallel.split = { "classifier.*" = "neurons" }, with parallel.scheme none',
    ),
    Refusal(
        (on("parallel.stages"), is_("parallel.scheme", AUTO)),
        "auto chooses which workers hold one model",
        "leave one of them out",
    ),
    Refusal(
        (is_("parallel.scheme", AUTO), off("parallel.parts")),
        "the number of parts decides bits, and what is chosen must not",
        "say one that numbers of workers divide, as parallel.parts = 4",
    ),
    Refusal(
        (any_of(on("parallel.data"), on("parallel.model")), is_("parallel.scheme", AUTO)),
        "auto chooses it",
    ),
)

_CONSTRAINED = (
    Refusal(
        (is_not("prune.how", MAGNITUDE), IN_REPLICAS),
        "the weights to keep are chosen by their size, which differs among replicas",
        "take prune.how = magnitude",
    ),
    Refusal(
        (is_not("prune.scope", LAYER), is_not("prune.how", MAGNITUDE), *SHARDED_SERVER),
        "the weights to keep are chosen among all layers, which ranks share out",
        "take prune.scope = layer, or leave synchrony.server out",
    ),
    Refusal(
        (
            is_not("prune.how", MAGNITUDE),
            any_of(on("prune.keep"), on("prune.threshold")),
            on("share.bits"),
        ),
        "weights that share a value are chosen at the start, when those that are pruned are not "
        "known yet",
        "share in a second training, which begins with the pruned weights (model.weights)",
    ),
    Refusal(
        (is_("prune.how", GRADUAL), on("prune.threshold")),
        "its schedule goes to a share",
        "say prune.keep",
    ),
    Refusal(
        (is_not("prune.how", MAGNITUDE), off("prune.steps")),
        "weights are pruned over some steps",
        "say over how many, as prune.steps = 1000",
    ),
)

_TRAINING = (
    Refusal(
        (on("train.steps"), on("train.epochs")),
        "one of them says how long to train",
        "leave the other out",
    ),
    Refusal(
        (on("model"), on("model.args")),
        "arguments are of a network that the recipe names",
        "give model=lambda: MyNet(…)",
    ),
    Refusal(
        (is_("solver.momentum_form", "caffe"), is_not("solver.type", *OF_CAFFE)),
        "Caffe has no such form of it",
        f"{', '.join(OF_CAFFE)} have it",
    ),
    Refusal(
        (is_("solver.decay_form", "decoupled"), is_not("solver.type", *MAY_DECOUPLE)),
        "the decay of this solver cannot be separated from its update",
        f"{', '.join(MAY_DECOUPLE)} have it; that of adam is solver.type adamw",
    ),
    Refusal(
        (is_("solver.decay_form", "l1"), is_not("solver.type", *MAY_L1)),
        "this solver has no such decay",
        f"{', '.join(MAY_L1)} have it",
    ),
    Refusal(
        (is_("solver.type", "nesterov"), is_("solver.momentum", 0)),
        "nesterov is SGD whose momentum looks ahead",
        "say solver.momentum = 0.9, or solver.type = sgd",
    ),
    Refusal(
        (on("solver.warmup_steps"), is_("solver.lr_policy", "one_cycle")),
        "one_cycle rises by itself, over solver.pct_start of the training",
        "leave solver.warmup_steps out",
    ),
)

REFUSALS = (
    *_TRAINING,
    *_DATA,
    *_EXCHANGE,
    *OF_SERVERS,
    *OF_REPLICAS,
    *_PARALLEL,
    *_SHARDS,
    *_CONSTRAINED,
)
"""The rows. If several apply, the first is reported."""


OF_RANKS = tuple(row for row in REFUSALS if row.needs != "words")


def refusals(facts: Facts, rows: Iterable[Refusal] = REFUSALS) -> Iterator[Refusal]:
    return (row for row in rows if row.holds(facts))


def check_together(recipe: Recipe, rows: Iterable[Refusal] = REFUSALS, **given: Any) -> None:
    """Check settings together, with what is `given` of `terms.GIVEN`. Raises: RecipeError."""
    facts = facts_of(recipe, given)
    if row := next(refusals(facts, rows), None):
        raise RecipeError(row.line(facts))


def is_refused(recipe: Recipe) -> bool:
    return any(refusals(facts_of(recipe, {})))


def num_combinations() -> int:
    """Count the refused combinations: alternatives within a row count once each."""
    return len({combination for row in REFUSALS for combination in combinations(row.when)})
