"""The table of refusals: which settings of a recipe cannot be combined, and why; a row per reason.

Each row is an example in a test. Checks of single settings are next to their Config or in
`checked_recipe`, and those of numbers that have to fit each other in `fits`.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from firecaffe.compression import GRADUAL, LAYER, MAGNITUDE
from firecaffe.errors import RecipeError
from firecaffe.parallel.config import AUTO, ONE_WEIRD_TRICK
from firecaffe.recipe.idle_settings import with_effect
from firecaffe.recipe.sections import Recipe
from firecaffe.recipe.terms import (
    BY_SERVER,
    CAFFE_NET,
    CODEC,
    CONSTRAINED,
    FLOAT16,
    IN_REPLICAS,
    IN_SHARDS,
    LOCKLESS,
    NOT_EVERY_STEP,
    OUT_OF_ORDER,
    OWN_SOLVER,
    ROW,
    SHARDED_SERVER,
    SHARES,
    SIMULATED,
    TRANSFORMS,
    VARIABLE_LENGTH,
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
from firecaffe.solvers.config import (
    BY_LAYER,
    DROPPING,
    MAY_DECOUPLE,
    MAY_L1,
    OF_CAFFE,
    OF_PLAIN_MOMENTUM,
)

REFUSALS: tuple[Refusal, ...] = (
    # The network and its training
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
    # Data
    Refusal((on("validation_set"), on("data.hold_out")), "each gives the samples for validation"),
    Refusal(
        (any_of(on("data.hold_out"), on("data.balance")), is_("data.order", "shards")),
        "what is left of a shard, or drawn by weights, does not lie together",
        "take data.order = samples",
    ),
    Refusal(
        (any_of(*TRANSFORMS), is_("data.name", CAFFE_NET)),
        "the transform_param of the net's data layers decides",
        "leave the word out",
    ),
    # Exchanges
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
    # Modes with a server
    Refusal(
        (is_("exchange.compressor", VARIABLE_LENGTH), BY_SERVER),
        "a server takes gradients one by one, each in as many bytes",
        "use one of float16, bfloat16, int8, one_bit, top_k",
        "unwritten",
    ),
    Refusal(
        (on("exchange.compressor_level"), CODEC, BY_SERVER),
        "each micro-batch's gradient is encoded by itself",
        "leave exchange.compressor_level out",
    ),
    Refusal(
        (ROW, BY_SERVER),
        "a server gives works to single workers, not to those that hold one model together",
        kind="unwritten",
    ),
    Refusal(
        (OWN_SOLVER, SHARDED_SERVER),
        "an optimizer of your own may need what other ranks have",
        "take one by name, or synchrony.server = first",
    ),
    Refusal(
        (
            is_("synchrony.server_momentum", "delayed_nesterov"),
            any_of(
                is_not("solver.type", *OF_PLAIN_MOMENTUM),
                is_not("solver.momentum_form", "torch"),
                is_not("solver.decay_form", "l2"),
                is_("solver.momentum", 0),
            ),
        ),
        "its formula is of sgd or nesterov, with a momentum, in momentum_form torch and "
        "decay_form l2",
    ),
    Refusal(
        (
            any_of(
                on("synchrony.server"),
                on("synchrony.gradients_per_update"),
                on("synchrony.staleness_rate"),
                on("synchrony.compensate"),
                on("synchrony.server_momentum"),
                on("train.ema_decay"),
                on("synchrony.in_flight"),
                CODEC,
                *CONSTRAINED.terms,
            ),
            LOCKLESS,
        ),
        "no server could do it: workers write to the same weights",
        "leave it out, or take synchrony.lock = server",
    ),
    Refusal(
        (FLOAT16, LOCKLESS),
        "the loss scale follows the order of updates, which nobody knows",
        "use bfloat16, or synchrony.lock = server",
    ),
    Refusal(
        (is_not("solver.type", *OF_PLAIN_MOMENTUM), LOCKLESS),
        "workers add to the same weights, and another rule's state is more than a sum",
        f"take solver.type = {' or '.join(OF_PLAIN_MOMENTUM)}",
    ),
    Refusal(
        (on("solver.momentum_correction"), LOCKLESS),
        "it scales the momentum, which all workers share, by the rate of one worker's last update",
        "leave it out, or take synchrony.lock = server",
    ),
    Refusal(
        (any_of(is_("train.device", "cuda"), on("gpus")), LOCKLESS),
        "weights are shared in the host's memory",
        "use train.device = cpu",
    ),
    Refusal(
        (any_of(on("hosts"), is_not("system", "linux")), LOCKLESS),
        "all workers write to the same memory, of one host with Linux",
        "use synchrony.lock = server",
    ),
    Refusal(
        (on("workers"), SIMULATED),
        "the simulated clock is one process, whose learners are synchrony.learners",
        "use --nproc-per-node 1, or synchrony.clock = real",
    ),
    Refusal(
        (is_("synchrony.speeds", "measured"), off("synchrony.speeds_from")),
        "speeds = measured and the file of the timings come together",
        "name the file, RUN/timings/rank-0.jsonl",
    ),
    # Mode local
    Refusal(
        (is_("synchrony.inner_momentum", "average"), on("synchrony.overlap_steps")),
        "momentum has gone on when its average comes",
        "use keep or zero",
    ),
    Refusal(
        (
            on("synchrony.warm_steps"),
            any_of(on("synchrony.warm_epochs"), on("synchrony.warm_until_drop")),
        ),
        "one of them says when replicas part",
        "leave the other out",
    ),
    Refusal(
        (on("synchrony.warm_epochs"), on("synchrony.warm_until_drop")),
        "one of them says when replicas part",
        "leave the other out",
    ),
    Refusal(
        (on("synchrony.warm_until_drop"), is_not("solver.lr_policy", *DROPPING)),
        "the rate of this policy does not drop",
        f"it counts with {' and '.join(DROPPING)}",
    ),
    Refusal(
        (is_("parallel.scheme", ONE_WEIRD_TRICK), IN_REPLICAS),
        "each worker of a row then has its own samples, while a replica is a whole row's",
    ),
    # Split models
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
    # Sharded updates
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
    # Pruned and shared weights
    Refusal(
        (is_not("prune.how", MAGNITUDE), IN_REPLICAS),
        "the weights to keep are chosen by their size, which differs among replicas",
        "take prune.how = magnitude",
    ),
    Refusal(
        (is_not("prune.scope", LAYER), is_not("prune.how", MAGNITUDE), SHARDED_SERVER),
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
"""The rows. If several apply, the first is reported."""

OF_RANKS = tuple(row for row in REFUSALS if {"workers", "hosts", "gpus", "system"} & {*row.words})


def refusals(facts: Facts, rows: Iterable[Refusal] = REFUSALS) -> Iterator[Refusal]:
    """Yield the rows that refuse these facts, which come from `with_effect`."""
    return (row for row in rows if row.holds(facts))


def check_together(recipe: Recipe, rows: Iterable[Refusal] = REFUSALS, **given: Any) -> None:
    """Check settings together; `given`: facts of `terms.GIVEN`. Raises: RecipeError."""
    facts = with_effect(facts_of(recipe, given))
    if row := next(refusals(facts, rows), None):
        raise RecipeError(row.line(facts))


def is_refused(recipe: Recipe) -> bool:
    return any(refusals(with_effect(facts_of(recipe, {}))))


def num_combinations() -> int:
    """Count the refused combinations: alternatives within a row count once each."""
    return len({combination for row in REFUSALS for combination in combinations(row.when)})
