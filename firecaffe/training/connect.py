"""Makes the reducer that sums a learner's gradients, or its replicas, over all ranks."""

from contextlib import ExitStack, closing

from firecaffe.cluster.groups import group_of_one
from firecaffe.cluster.world import World
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
    world: World,
    hook: tuple[object, Hook] | None,
    resources: ExitStack,
) -> tuple[Run, GradientReducer, AutoChoice | None]:
    """Makes the reducer. All ranks call it. Returns the run as these ranks can do it, the reducer,
    and `auto`'s choice if the recipe asks for it. resources: takes what has to be closed.

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
    choice = None
    if run.algorithm == AUTO:
        sizes = [parameter.nbytes for parameter in learner.in_ready_order]
        spans = cut(sizes, words.bucket_bytes)
        buckets = [sum(sizes[start:stop]) for start, stop in spans]
        choice = choose_exchange(world, buckets, run.route)
        run = run.by(choice.algorithm)
    if hook is not None and world.group is None:
        resources.enter_context(group_of_one(world.device))
    tail, counts = learner.forward.empty_tail(), empty_counts(learner.forward)
    if run.recipe.synchrony.mode == LOCAL:
        assert learner.local is not None
        tail, counts = learner.local.examples(learner.forward)
    exchange = resources.enter_context(closing(Exchange(world, run.route, local)))
    reducer = GradientReducer(
        learner.named,
        learner.probe.ready_order,
        tail,
        counts,
        run.num_leaves,
        exchange,
        words.bucket_bytes,
        hook,
    )
    resources.enter_context(reducer)
    if reducer.codec_memory is not None:
        learner.state.add("compressor", reducer.codec_memory)
    learner.state.check_all_was_loaded()
    return run, reducer, choice
