"""Rows of the table of refusals: modes with a server, and local replicas."""

from firecaffe.parallel.config import ONE_WEIRD_TRICK
from firecaffe.recipe.terms import (
    BY_SERVER,
    CODEC,
    CONSTRAINED,
    FLOAT16,
    IN_REPLICAS,
    LATE,
    LOCKLESS,
    OF_MANY_LENGTHS,
    OWN_SOLVER,
    ROW,
    SHARDED_SERVER,
    SHARES,
    SIMULATED,
    Refusal,
    any_of,
    is_,
    is_not,
    off,
    on,
)
from firecaffe.solvers.config import DROPPING, OF_PLAIN_MOMENTUM

OF_SERVERS = (
    Refusal(
        (FLOAT16, BY_SERVER),
        "the loss scale changes while gradients are under way",
        "use bfloat16",
        "unwritten",
    ),
    Refusal(
        (is_("exchange.compressor", OF_MANY_LENGTHS), BY_SERVER),
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
        (OWN_SOLVER, *SHARDED_SERVER),
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
            LATE,
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
            *LOCKLESS,
        ),
        "no server could do it: workers write to the same weights",
        "leave it out, or take synchrony.lock = server",
    ),
    Refusal(
        (is_not("solver.type", *OF_PLAIN_MOMENTUM), *LOCKLESS),
        "workers add to the same weights, and another rule's state is more than a sum",
        f"take solver.type = {' or '.join(OF_PLAIN_MOMENTUM)}",
    ),
    Refusal(
        (on("solver.momentum_correction"), *LOCKLESS),
        "it scales the momentum, which all workers share, by the rate of one worker's last update",
        "leave it out, or take synchrony.lock = server",
    ),
    Refusal(
        (any_of(is_("train.device", "cuda"), on("gpus")), *LOCKLESS),
        "weights are shared in the host's memory",
        "use train.device = cpu",
    ),
    Refusal(
        (any_of(on("hosts"), is_not("system", "linux")), *LOCKLESS),
        "all workers write to the same memory, of one host with Linux",
        "use synchrony.lock = server",
    ),
    Refusal(
        (on("workers"), *SIMULATED),
        "the simulated clock is one process, whose learners are synchrony.learners",
        "use --nproc-per-node 1, or synchrony.clock = real",
    ),
    Refusal(
        (is_("synchrony.speeds", "measured"), off("synchrony.speeds_from"), BY_SERVER),
        "speeds = measured and the file of the timings come together",
        "name the file, RUN/timings/rank-0.jsonl",
    ),
)

OF_REPLICAS = (
    Refusal(
        (SHARES, IN_REPLICAS), "a replica has its own micro-batches, and which it has decides bits"
    ),
    Refusal(
        (is_("synchrony.inner_momentum", "average"), on("synchrony.overlap_steps"), IN_REPLICAS),
        "momentum has gone on when its average comes",
        "use keep or zero",
    ),
    Refusal(
        (
            on("synchrony.warm_steps"),
            any_of(on("synchrony.warm_epochs"), on("synchrony.warm_until_drop")),
            IN_REPLICAS,
        ),
        "one of them says when replicas part",
        "leave the other out",
    ),
    Refusal(
        (on("synchrony.warm_epochs"), on("synchrony.warm_until_drop"), IN_REPLICAS),
        "one of them says when replicas part",
        "leave the other out",
    ),
    Refusal(
        (on("synchrony.warm_until_drop"), is_not("solver.lr_policy", *DROPPING), IN_REPLICAS),
        "the rate of this policy does not drop",
        f"it counts with {' and '.join(DROPPING)}",
    ),
    Refusal(
        (is_("parallel.scheme", ONE_WEIRD_TRICK), IN_REPLICAS),
        "each worker of a row then has its own samples, while a replica is a whole row's",
    ),
)
