"""Makes a learner's gradient reducers: one, or one for each fragment of its replicas."""

from collections.abc import Sequence
from contextlib import ExitStack, closing

from firecaffe.cluster.group import Group
from firecaffe.cluster.groups import group_of_one
from firecaffe.exchange.choose import AUTO
from firecaffe.gradients.bucket_sums import Hook
from firecaffe.gradients.buckets import cut
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.recipe.run import Run
from firecaffe.training.learner import Learner
from firecaffe.training.modes.mode import Summed
from firecaffe.transport.auto_exchange import AutoChoice, choose_exchange
from firecaffe.transport.exchange import Exchange
from firecaffe.transport.local_ranks import LocalRanks, meet_local_ranks


def connect(
    run: Run,
    learner: Learner,
    summed: Sequence[Summed],
    world: Group,
    hook: tuple[object, Hook] | None,
    resources: ExitStack,
) -> tuple[Run, list[GradientReducer], AutoChoice | None]:
    """Make one reducer for each of `summed`. All ranks call it. Raises: PeerLostError.

    Returns also the run as these ranks can do it, and `auto`'s choice if the recipe asks for it.
    """
    config = run.recipe.exchange
    local: LocalRanks | None = None
    if run.route.shares_memory:
        local = meet_local_ranks(world, config.timeout_s)
    if local is None:
        run = run.without_shared_memory()
    else:
        resources.callback(local.close)  # also if there is no exchange yet that closes it
    named, order_of = learner.holding.named, learner.probe.order_of
    orders = [order_of(named, part.named) for part in summed]
    choice = None
    if run.algorithm == AUTO and run.has_exchange:
        buckets = list[int]()
        for part, order in zip(summed, orders, strict=True):
            tensors = list(part.named.values())
            sizes = [tensors[place].nbytes for place in order]
            buckets += [sum(sizes[start:stop]) for start, stop in cut(sizes, config.bucket_bytes)]
        choice = choose_exchange(world, buckets, run.route)
        run = run.by(choice.algorithm)
    if hook is not None and world.group is None:
        resources.enter_context(group_of_one(world.device))
    exchange = resources.enter_context(closing(Exchange(world, run.route, local)))
    made = run.num_leaves, exchange, config.bucket_bytes, hook, learner.update.shards
    reducers = [
        resources.enter_context(GradientReducer(part.named, order, part.tail, part.counts, *made))
        for part, order in zip(summed, orders, strict=True)
    ]
    for place, reducer in enumerate(reducers):
        if reducer.coded is not None:
            name = "compressor" if len(reducers) == 1 else f"compressor-{place}"
            learner.state.add(name, learner.holding.memory(reducer.coded.memory))
    learner.state.check_all_was_loaded()
    return run, reducers, choice
