"""Builds what runs a training's steps, once its ranks are connected."""

from collections.abc import Sequence
from contextlib import ExitStack, closing

from firecaffe.data import Data
from firecaffe.data.train_batches import BatchesAhead
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.recipe.run import Run
from firecaffe.training.connect import connect
from firecaffe.training.data_workers import data_workers
from firecaffe.training.learner import Learner
from firecaffe.training.modes.every_step import EveryStep
from firecaffe.training.modes.mode import Linked, ModeParts, Steps
from firecaffe.training.parallel.mesh import Mesh
from firecaffe.training.plugins import Plugin, around_batches
from firecaffe.training.served.server_steps import Source


def make_steps(
    run: Run,
    learner: Learner,
    mesh: Mesh,
    data: Data,
    reducers: Sequence[GradientReducer],
    plugins: Sequence[Plugin],
    first_step: int,
    is_repeatable: bool,
    resources: ExitStack,
    source: Source | None = None,
) -> Steps:
    """Build the steps; every rank calls it. first_step: the step to resume from.

    reducers: for what the mode wants summed. is_repeatable: of the training data; if they prove not
    to be, the learner gets doubts. source: of a server's events, instead of its clock.
    """
    holding, mode = learner.holding, learner.mode
    first = mode.first_run(run, first_step)
    leaves = first.micro_batches(mesh.sharers.rank)
    fetched = leaves if holding.has_inputs else []
    late_doubts = learner.doubts if is_repeatable else None
    last = mode.last_ahead(run)
    ahead = BatchesAhead(learner.batches, fetched, first_step, last, late_doubts)
    resources.enter_context(closing(ahead))
    resources.enter_context(data_workers(data))  # closed first, so that nobody waits for them
    sums = reducers[0]
    if first is not run:  # steps of another mode come first
        of_step = ModeParts(learner.update).summed()
        _, [sums], _ = connect(first, learner, of_step, mesh.sharers, None, resources)
    update = learner.update.connect(sums)
    in_order = around_batches(plugins, ahead, mesh.world)
    return mode.steps(
        Linked(
            run=run,
            mesh=mesh,
            step=EveryStep(holding, update, in_order, leaves, run.momentum, learner.noise.is_due),
            reducers=reducers,
            ahead=ahead,
            batches=around_batches(plugins, learner.batches, mesh.world),
            state=learner.state,
            probe=learner.probe.digest,
            resources=resources,
            source=source,
        )
    )
