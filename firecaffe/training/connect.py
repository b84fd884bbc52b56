"""Makes the reducer that sums a learner's gradients over all ranks, or one for each fragment of its
replicas.
"""

from collections.abc import Mapping
from contextlib import ExitStack, closing

from torch import nn

from firecaffe.cluster.group import Group
from firecaffe.cluster.groups import group_of_one
from firecaffe.exchange.choose import AUTO
from firecaffe.gradients.buckets import cut
from firecaffe.gradients.combine import Hook
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.recipe.run import Run
from firecaffe.synchrony.config import LOCAL
from firecaffe.training.learner import Learner
from firecaffe.training.step import empty_counts
from firecaffe.transport.auto import AutoChoice, choose_exchange
from firecaffe.transport.exchange import Exchange
from firecaffe.transport.local import LocalRanks, meet_local_ranks


def connect(
    run: Run,
    learner: Learner,
    world: Group,
    hook: tuple[object, Hook] | None,
    resources: ExitStack,
) -> tuple[Run, list[GradientReducer], AutoChoice | None]:
    """Makes the reducers: one, or of each fragment. All ranks call it. Returns the run as these
    ranks can do it, the reducers, and `auto`'s choice if the recipe asks for it. resources: takes
    what has to be closed.

    Raises: PeerLostError.
    """
    words = run.recipe.exchange
    local: LocalRanks | None = None
    if run.route.shares_memory:
        local = meet_local_ranks(world, words.timeout_s)
    if local is None:
        run = run.without_shared_memory()
    else:
        resources.callback(local.close)  # also if there is no exchange yet that closes it
    parts: list[Mapping[str, nn.Parameter]] = [learner.summed]
    tails, counts = [learner.forward.empty_tail()], empty_counts(learner.forward)
    if run.recipe.synchrony.mode == LOCAL:
        assert learner.local is not None
        parts = [fragment.named for fragment in learner.local.fragments]
        tails, counts = learner.local.tails(learner.forward), learner.local.sums.no_counts()
    orders = [learner.ready_order(part) for part in parts]
    choice = None
    if run.algorithm == AUTO:
        buckets = list[int]()
        for part, order in zip(parts, orders, strict=True):
            tensors = list(part.values())
            sizes = [tensors[place].nbytes for place in order]
            buckets += [sum(sizes[start:stop]) for start, stop in cut(sizes, words.bucket_bytes)]
        choice = choose_exchange(world, buckets, run.route)
        run = run.by(choice.algorithm)
    if hook is not None and world.group is None:
        resources.enter_context(group_of_one(world.device))
    exchange = resources.enter_context(closing(Exchange(world, run.route, local)))
    made = run.num_leaves, exchange, words.bucket_bytes, hook, learner.shards
    reducers = [
        resources.enter_context(GradientReducer(part, order, tail, counts, *made))
        for part, order, tail in zip(parts, orders, tails, strict=True)
    ]
    for place, reducer in enumerate(reducers):
        if reducer.codec_memory is not None:
            name = "compressor" if len(reducers) == 1 else f"compressor-{place}"
            learner.state.add(name, learner.memory_of(reducer.codec_memory))
    learner.state.check_all_was_loaded()
    return run, reducers, choice
