"""The training loop, from the first step to the result."""

import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from firecaffe.cluster.group import Group
from firecaffe.cluster.world import World
from firecaffe.data import Data, Dataset
from firecaffe.data.train_batches import BatchesAhead
from firecaffe.errors import DivergedError
from firecaffe.recipe.run import Run
from firecaffe.training.best import Best, test_best
from firecaffe.training.checkpoint import BEST, GOOD, Checkpoint, checkpoint_name
from firecaffe.training.divergence import Rise, explained
from firecaffe.training.evaluation import Evaluation, evaluate
from firecaffe.training.evaluation_weights import Norms
from firecaffe.training.modes.mode import Mode, Queued
from firecaffe.training.noise_meter import NoiseMeter
from firecaffe.training.outcome import Votes
from firecaffe.training.rebalance import MeasuredShares
from firecaffe.training.records import Records
from firecaffe.training.result import Result, StepSums, result_of
from firecaffe.training.saver import PATIENCE_S, Saver
from firecaffe.training.served.real import RealRanks
from firecaffe.training.state import WEIGHTS, State, weights_digest
from firecaffe.training.stop import StopRequest, stopped


@dataclass(frozen=True)
class Training:
    run: Run
    world: World
    evaluators: Group
    """The ranks that share out the samples of an evaluation."""
    estimators: Group
    """The ranks that share out the micro-batches for its BatchNorm statistics."""
    tellers: Group
    """The ranks that then exchange their results."""
    data: Data
    stepper: Mode
    ahead: BatchesAhead
    shares: MeasuredShares | None
    """None if shares do not change between steps."""
    state: State
    best: Best
    norms: Norms | None
    """The BatchNorm statistics of evaluations; None if they use the training's own."""
    noise: NoiseMeter
    rise: Rise | None
    """Detects a loss that stays above its start; None if all workers make each step together."""
    saver: Saver
    folder: Path
    first_step: int
    """The number of steps that were done before."""
    probe: str
    """The digest of what this machine computes for the probe's micro-batch."""
    doubts: list[str]
    """Reasons why other numbers of workers may not end in the same bits; more may follow."""
    real: RealRanks | None = None
    """Runs the ranks after the warm steps, under the real clock of a mode with a server."""


def train(t: Training, records: Records) -> Result:
    """Train to the run's last step; all ranks return the same result.

    Raises: PreemptedError if the run was asked to stop, LauncherLostError if its launcher is gone;
    its checkpoint is saved then. NotFiniteError or DivergedError on all ranks.
    """
    with StopRequest() as stop:
        loop = _Loop(t, records, stop)
        loop.begin()
        if t.real is None:
            loop.run(t.run.steps)
            return loop.end()
        loop.run(min(t.real.first_step, t.run.steps))
        if loop.is_over:
            return loop.end()
        t.stepper.update.close()  # from here on no rank waits for all others
        if not t.world.is_first:
            return _work(t, t.real, stop)
        with t.real.serving(records.say):
            alone = t.real.alone()
            loop.go_on_alone(alone)
            t.state.go_on_alone(alone)
            loop.run(t.run.steps)
            result = loop.end()
            t.real.end(result.as_message())
        return result


def _work(t: Training, real: RealRanks, stop: StopRequest) -> Result:
    result = Result.of_message(real.work(lambda: stop.reason))
    result.hold(t.stepper.holding.forward.model)
    return result


class _Loop:
    def __init__(self, t: Training, records: Records, stop: StopRequest) -> None:
        self.t, self._records, self._stop = t, records, stop
        self._known = list(t.doubts)
        broken = [getattr(part, "skipped", {}) for part in t.data.parts.values()]
        self._sums = StepSums(t.first_step + 1, broken=broken)
        self._saved_s, self._is_put_off = time.monotonic(), False
        t.world.traffic.begin()  # earlier traffic belongs to no step
        self._queued: deque[Queued] = deque()
        self._last = t.first_step
        self._validation: Evaluation | None = None

    def go_on_alone(self, world: World) -> None:
        self.t = replace(self.t, world=world, evaluators=world, estimators=world, tellers=world)

    @property
    def is_over(self) -> bool:
        t = self.t
        return self._last >= t.run.steps or t.best.is_enough(t.run.recipe.train.stop_after)

    def begin(self) -> None:
        """Do a due evaluation, if the run was asked to stop before it."""
        t, last = self.t, self._last
        is_due = _is_due(t.run, t.run.recipe.train.eval_every, last)
        if last < t.run.steps and t.best.evaluated < last and is_due:
            with self._explained():
                self._validation = _validate(t, last, self._records)
                if _is_new_best(t, last):
                    self._save(last, is_now=True)

    def run(self, until: int) -> None:
        """Train up to step `until`, or to an early end. Raises: as `train`."""
        with self._explained():
            while self._last < until and not self.is_over:
                self._step(self._last)
                self._records.between_steps()

    def _step(self, step: int) -> None:
        t, run, recipe = self.t, self.t.run, self.t.run.recipe
        start, done = time.perf_counter(), step + 1
        self._last = done
        t.world.place.step = done
        self._queued.append(t.stepper.run(step, run.learning_rate(step), self._vote))
        votes = self._read(0 if _is_looked_at(run, done) else t.stepper.behind)
        if recipe.run.digests:
            _make_whole(t)
            self._records.digests(done, t.state.digest_each())
        if not run.rounds.is_whole(done):
            self._sums.add_time(done, time.perf_counter() - start)
            return
        self._validation = None
        if done < run.steps and not votes.stop and _is_due(run, recipe.train.eval_every, done):
            begun = time.perf_counter()
            self._validation = _validate(t, done, self._records)
            start += time.perf_counter() - begun  # evaluation is no part of the step
        is_due = _is_due(run, recipe.checkpoint.every, done) or _is_new_best(t, done)
        if not self.is_over and (is_due or votes.save or votes.stop):
            self._read(0)  # what these steps vote for is done now
            self._save(done, is_now=votes.stop or _is_new_best(t, done))
        if t.shares is not None and done < run.steps and t.shares.balance.is_due(done):
            self._read(0)  # the steps that ran with these shares
            if said := t.shares.decide(done):
                self._records.say(said)
        self._sums.add_time(done, time.perf_counter() - start)
        if done < run.steps and votes.stop:
            reason = self._stop.reason  # read before others may be asked to end
            t.saver.finish_together(t.world)
            raise stopped(reason, done, t.folder)

    def _vote(self) -> Votes:
        every_s, real = self.t.run.recipe.checkpoint.every_s, self.t.real
        is_due = every_s and time.monotonic() - self._saved_s >= every_s
        is_ready = self._is_put_off and not self.t.saver.is_writing
        is_asked = bool(self._stop.reason) or (real is not None and real.is_asked_to_stop)
        return Votes(stop=is_asked, save=(bool(is_due) or is_ready) and self.t.world.is_first)

    def _save(self, done: int, is_now: bool) -> None:
        """Save, or put it off if the disk is busy with the last one. is_now: never put it off."""
        saver, world = self.t.saver, self.t.world
        if is_now:
            saver.wait(world)
        elif not saver.wait(world, 0 if self._is_put_off else PATIENCE_S):
            if not self._is_put_off:
                saver.put_off()
                self._records.say(f"checkpoint of step {done} put off: the one before is written")
            self._is_put_off = True
            return
        _save(self.t, done)
        self._saved_s, self._is_put_off = time.monotonic(), False

    def _read(self, left: int) -> Votes:
        """Read the outcomes of the queued steps, except the last `left`."""
        t, votes = self.t, Votes()
        while len(self._queued) > left:
            result = self._queued.popleft().read(self._look)
            done = result.timings.step
            t.state.losses.add(result.loss)
            self._sums.add(result)
            if t.shares is not None:
                t.shares.balance.add(result)
            noise = t.noise.add(done, result.squares)
            self._records.step(done, t.run.learning_rate(done - 1), result, noise)
            if t.rise is not None:
                t.rise.add(result.loss)
                _check_rise(t, t.rise, done)
            votes = Votes(votes.stop or result.votes.stop, votes.save or result.votes.save)
        return votes

    def _look(self) -> None:
        if self.t.world.watch is not None:
            self.t.world.watch.check()

    def end(self) -> Result:
        t, recipe, last, records = self.t, self.t.run.recipe, self._last, self._records
        with self._explained():
            if t.first_step < last:
                self._save(last, is_now=True)  # before the evaluation, which may fail
            if self._validation is None:
                self._validation = _validate(t, last, records)
                if t.first_step < last and _is_new_best(t, last):
                    t.best.keep(_path(t, last))
                    t.saver.wait(t.world)
                    t.saver.mark_best(last)
            stopped_early = t.best.is_enough(recipe.train.stop_after)
            if stopped_early:
                records.say(t.best.no_better(last))
            test = _evaluate(t, t.data.test, "test", last, records)
            t.saver.finish_together(t.world)
            test_of_best = None
            # Under the real clock of a server the weights are in other processes, too.
            if stopped_early and t.best.step < last and t.real is None:
                tested = partial(_evaluated, t, t.data.test)
                test_of_best = test_best(t.world, t.state, t.best, tested, records.say)
        if recipe.checkpoint.every or recipe.checkpoint.every_s:
            records.say(t.saver.costs.line)
        result = result_of(
            t.world,
            t.state,
            self._sums,
            last,
            t.saver.costs,
            t.doubts,
            t.stepper.holding.forward.task.measure,
            self._validation,
            test,
            t.best,
            test_of_best,
            stopped_early,
            t.noise.row,
            t.folder,
        )
        t.stepper.update.take_average()
        if t.norms is not None:
            t.norms.put()
        if t.state.has_all_weights:
            result.hold(t.stepper.holding.forward.model)
        for line in result.lines(self._known):
            records.say(line)
        return result

    def _explained(self) -> AbstractContextManager[None]:
        t = self.t
        return explained(t.world, t.saver, t.folder / "checkpoints", t.run.learning_rate)


def _is_due(run: Run, every: int, done: int) -> bool:
    # What is due within a round is done when the state is whole again.
    return bool(every) and done // every > run.rounds.last_whole(done) // every


def _is_looked_at(run: Run, done: int) -> bool:
    # Whether the state after this step is needed, with all losses so far.
    recipe = run.recipe
    is_due = any(_is_due(run, n, done) for n in (recipe.checkpoint.every, recipe.train.eval_every))
    return run.rounds.is_whole(done) and (done == run.steps or is_due or recipe.run.digests)


def _make_whole(t: Training) -> None:
    if t.real is not None:
        t.real.gather()


def _save(t: Training, done: int) -> None:
    _make_whole(t)
    _estimate_norms(t, done)
    about = Checkpoint(
        step=done, identity=dict(t.run.deciding), probe=t.probe, doubts=list(t.doubts)
    )
    marks = []
    if _is_new_best(t, done):
        t.best.keep(_path(t, done))
        marks.append(BEST)
    if t.rise is not None and t.rise.saves_lowest():
        marks.append(GOOD)
    t.saver.save(about, t.state, marks)


def _check_rise(t: Training, rise: Rise, done: int) -> None:
    if rise.line:
        error = DivergedError(f"{rise.line}; {t.stepper.advice}")
        error.step = done
        raise error


def _path(t: Training, done: int) -> str:
    return str(t.folder / "checkpoints" / checkpoint_name(done))


def _is_new_best(t: Training, done: int) -> bool:
    # Whether the step's evaluation is the best so far, and its checkpoint is to be kept.
    return t.run.recipe.checkpoint.best and t.best.step == done == t.best.evaluated


def _validate(t: Training, done: int, records: Records) -> Evaluation | None:
    if t.data.validation is None:
        return None
    evaluation = _evaluate(t, t.data.validation, "validation", done, records)
    if t.world.is_first and t.state.has_all_weights:
        records.weights(done, weights_digest(t.state.tensors_held_by_all(WEIGHTS)))
    if t.best.evaluated != done:  # else the run was resumed from there
        t.best.add(done, evaluation)
    return evaluation


def _evaluate(t: Training, dataset: Dataset, split: str, done: int, records: Records) -> Evaluation:
    _make_whole(t)
    _estimate_norms(t, done)
    evaluation = _evaluated(t, dataset)
    records.evaluation(split, done, evaluation)
    return evaluation


def _evaluated(t: Training, dataset: Dataset) -> Evaluation:
    holding, recipe = t.stepper.holding, t.run.recipe
    averaged = t.stepper.update.evaluating()
    estimated = nullcontext() if t.norms is None else t.norms.in_place()
    with averaged, estimated, _turn(t), t.world.traffic.uncounted():
        return evaluate(
            holding.forward.model,
            holding.forward.task,
            dataset,
            recipe.data,
            recipe.train,
            t.evaluators,
            outputs_of=partial(holding.outputs, num_samples=len(dataset)),
            tellers=t.tellers,
        )


def _turn(t: Training) -> AbstractContextManager[object]:
    # Keeps learners of this rank from computing meanwhile.
    return nullcontext() if t.real is None else t.real.turn


def _estimate_norms(t: Training, done: int) -> None:
    if t.norms is None or t.norms.is_of(done):
        return
    t.ahead.close()  # a data set may not allow two readers
    with _turn(t), t.world.traffic.uncounted(), t.stepper.update.evaluating():
        t.norms.estimate(t.estimators, done)
    t.ahead.go_on(t.ahead.leaves, done)
