"""A run's training once more, step by step, on one worker: from its recipe, and of a mode with a
server from its log of events alone.

Nothing is asked of a clock: who computed what at which version, and what was dropped, is in
events.jsonl. All else is a function of the recipe, so the same bits have to come out.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from firecaffe.cluster.world import World
from firecaffe.errors import RunError
from firecaffe.recipe.check import CheckedRecipe
from firecaffe.recipe.parallel import layout_of
from firecaffe.recipe.run import Ranks, Run, resolve
from firecaffe.synchrony.log import EVENTS, LogReader
from firecaffe.training.arithmetic import arithmetic
from firecaffe.training.connect import connect
from firecaffe.training.facts import describe_training
from firecaffe.training.learner import Learner, build_learner
from firecaffe.training.modes.mode import Queued
from firecaffe.training.modes.parts import Steps
from firecaffe.training.parallel.mesh import make_mesh
from firecaffe.training.parts import Parts, open_parts
from firecaffe.training.served.make import leaves_of
from firecaffe.training.state import State
from firecaffe.training.steps import make_steps


class Again:
    """A training that goes on as far as it is asked to."""

    def __init__(self, run: Run, learner: Learner, steps: Steps, log: LogReader | None) -> None:
        self.run, self.learner = run, learner
        self._stepper, self._log = steps.stepper, log
        self.done = 0
        """The number of steps that are done."""

    @property
    def state(self) -> State:
        return self.learner.state

    def evaluating(self) -> AbstractContextManager[None]:
        """Puts the weights that evaluations take in place, for a `with` block."""
        return self._stepper.update.evaluating()

    @property
    def updates(self) -> int:
        """The number of updates so far, if a server makes them; else 0."""
        return 0 if self._log is None else self._log.version

    def advance(self) -> dict[int, float]:
        """Trains a step; of replicas that are apart, until their state is whole again. Returns the
        loss of each step, counted from 1.

        Raises: RunError with the line if the log is damaged, NotFiniteError.
        """
        run = self.run
        outcomes: dict[int, Queued] = {}
        while not outcomes or not run.rounds.is_whole(self.done):
            outcome = self._stepper.run(self.done, run.learning_rate(self.done))
            self.done += 1
            outcomes[self.done] = outcome
        losses = {step: outcome.read().loss for step, outcome in outcomes.items()}
        for loss in losses.values():
            self.state.losses.add(loss)
        return losses


@contextmanager
def train_again(folder: Path, recipe: CheckedRecipe, world: World, parts: Parts) -> Iterator[Again]:
    """The training of a run, from its beginning, for a `with` block.

    Args:
        folder: The run's folder.
        recipe: The run's recipe.
        world: This process alone.
        parts: What was given to the run in Python.

    Raises: RunError if the run has a server, and no log of its events.
    """
    if recipe.synchrony.is_lockless:
        raise RunError(
            f"{folder}: synchrony.lock none, so that workers wrote to the same weights at times "
            "that nobody knows; such a run cannot be computed again"
        )
    log = LogReader(folder / EVENTS) if recipe.synchrony.is_served else None
    recipe = replace(recipe, parallel=recipe.parallel.over(1, 1))
    with ExitStack() as resources:
        resources.enter_context(arithmetic(recipe.train, world.device))
        data = open_parts(recipe, parts)
        described = describe_training(recipe, data)
        run = resolve(recipe, data, Ranks(), described=described)
        if log is not None:
            log.expect(leaves_of(run.order, recipe.synchrony.warm_steps, run.steps))
        learners = 0 if log is None else log.learners
        mesh = make_mesh(world, layout_of(recipe.parallel, 1), resources)
        learner = build_learner(run, parts, data, mesh, None, (), resources, learners)
        run, reducers, _ = connect(
            run, learner, learner.mode.summed(), mesh.sharers, None, resources
        )
        made = run, learner, mesh, data, reducers
        steps = make_steps(*made, (), 0, True, resources, source=log)
        yield Again(run, learner, steps, log)
