"""The training loop, from the first step to the result."""

import time
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from firecaffe.cluster.agree import broadcast_text, gather_json
from firecaffe.cluster.group import Group
from firecaffe.cluster.world import World
from firecaffe.data import Dataset
from firecaffe.errors import DivergedError, NotFiniteError
from firecaffe.recipe.run import Run
from firecaffe.training.best import Best, evaluate_best
from firecaffe.training.checkpoint import BEST, GOOD, Checkpoint, checkpoint_name
from firecaffe.training.divergence import explained
from firecaffe.training.evaluation import Evaluation, evaluate
from firecaffe.training.learner import Learner
from firecaffe.training.modes.mode import PendingStep, Steps
from firecaffe.training.outcome import Votes
from firecaffe.training.records import Records
from firecaffe.training.result import Result, StepSums, facts_of_ranks, share
from firecaffe.training.saver import PATIENCE_S, Saver
from firecaffe.training.start import Start, StopRequest, stopped
from firecaffe.training.state import WEIGHTS, State, weights_digest


@dataclass(frozen=True)
class EvaluationGroups:
    world: World
    evaluators: Group
    """The ranks that share out the samples of an evaluation."""
    estimators: Group
    """The ranks that share out the micro-batches for its BatchNorm statistics."""
    result_group: Group
    """The ranks that exchange the results of an evaluation."""


@dataclass(frozen=True)
class Training:
    run: Run
    groups: EvaluationGroups
    learner: Learner
    steps: Steps
    records: Records
    saver: Saver
    folder: Path
    start: Start

    @property
    def world(self) -> World:
        return self.groups.world

    @property
    def state(self) -> State:
        return self.learner.state

    @property
    def best(self) -> Best:
        return self.learner.best


def train(t: Training) -> Result:
    """Train to the run's last step; all ranks return the same result.

    Raises: PreemptedError if the run was asked to stop, LauncherLostError if its launcher is gone,
    both after a checkpoint is saved; NotFiniteError or DivergedError on all ranks.
    """
    with StopRequest() as stop:
        loop = _Loop(t, stop)
        loop.begin()
        return t.steps.ranks.run(loop, lambda: stop.reason)


class _Loop:
    def __init__(self, t: Training, stop: StopRequest) -> None:
        self.t, self._stop = t, stop
        self._known = list(t.learner.doubts)
        broken = [getattr(part, "skipped", {}) for part in t.learner.data.parts.values()]
        self._sums = StepSums(t.start.step + 1, broken=broken)
        self._saved_s, self._is_put_off = time.monotonic(), False
        t.world.traffic.begin()  # earlier traffic belongs to no step
        self._queued: deque[PendingStep] = deque()
        self._last = t.start.step
        self._validation: Evaluation | None = None

    def part(self) -> None:
        self.t.learner.update.close()

    def continue_alone(self, world: World) -> None:
        self.t = replace(self.t, groups=EvaluationGroups(world, world, world, world))
        self.t.state.world = world

    def say(self, line: str) -> None:
        self.t.records.say(line)

    @property
    def is_over(self) -> bool:
        t = self.t
        return self._last >= t.run.steps or t.best.has_stalled(t.run.recipe.train.stop_after)

    def begin(self) -> None:
        """Do the evaluation that was due when the run was asked to stop, if any."""
        t, last = self.t, self._last
        is_due = _is_due(t.run, t.run.recipe.train.eval_every, last)
        if last < t.run.steps and t.best.evaluated < last and is_due:
            with self._explained():
                self._validation = _validate(t, last)
                if _is_new_best(t, last):
                    self._save(last, is_now=True)

    def run(self, until: int | None = None) -> None:
        with self._explained():
            while not self.is_over and (until is None or self._last < until):
                self._step(self._last)
                self.t.records.between_steps()

    def _step(self, step: int) -> None:
        t, run, recipe = self.t, self.t.run, self.t.run.recipe
        start, done = time.perf_counter(), step + 1
        self._last = done
        t.world.place.step = done
        self._queued.append(t.steps.stepper.run(step, run.learning_rate(step), self._vote))
        votes = self._read(0 if _needs_state(run, done) else t.steps.stepper.behind)
        if recipe.run.digests:
            t.steps.ranks.gather()
            t.records.digests(done, t.state.digest_each())
        if not run.rounds.is_whole(done):
            self._sums.add_time(done, time.perf_counter() - start)
            return
        self._validation = None
        if done < run.steps and not votes.stop and _is_due(run, recipe.train.eval_every, done):
            begun = time.perf_counter()
            self._validation = _validate(t, done)
            start += time.perf_counter() - begun  # an evaluation is not part of the step
        is_due = _is_due(run, recipe.checkpoint.every, done) or _is_new_best(t, done)
        if not self.is_over and (is_due or votes.save or votes.stop):
            self._read(0)  # these steps' votes are satisfied now
            self._save(done, is_now=votes.stop or _is_new_best(t, done))
        if done < run.steps and t.steps.shares.is_due(done):
            self._read(0)  # reads all steps that ran with these shares
            if said := t.steps.shares.decide(done):
                t.records.say(said)
        self._sums.add_time(done, time.perf_counter() - start)
        if done < run.steps and votes.stop:
            reason = self._stop.reason  # read before others may be asked to end
            t.saver.finish(t.world)
            raise stopped(reason, done, t.folder)

    def _vote(self) -> Votes:
        every_s = self.t.run.recipe.checkpoint.every_s
        is_due = every_s and time.monotonic() - self._saved_s >= every_s
        is_ready = self._is_put_off and not self.t.saver.is_writing
        is_asked = bool(self._stop.reason) or self.t.steps.ranks.is_asked_to_stop
        return Votes(stop=is_asked, save=(bool(is_due) or is_ready) and self.t.world.is_first)

    def _save(self, done: int, is_now: bool) -> None:
        """Save, or put it off while the last checkpoint is written. is_now: never put it off."""
        saver, world = self.t.saver, self.t.world
        if is_now:
            saver.wait(world)
        elif not saver.wait(world, 0 if self._is_put_off else PATIENCE_S):
            if not self._is_put_off:
                saver.costs.put_off += 1
                self.t.records.say(f"checkpoint of step {done} put off: the one before is written")
            self._is_put_off = True
            return
        _save(self.t, done)
        self._saved_s, self._is_put_off = time.monotonic(), False

    def _read(self, left: int) -> Votes:
        """Read the outcomes of the queued steps, except the last `left`."""
        t, votes = self.t, Votes()
        while len(self._queued) > left:
            result = self._queued.popleft().read(t.world.watch.check)
            done = result.timings.step
            t.state.losses.add(result.loss)
            self._sums.add(result)
            t.steps.shares.add(result)
            noise = t.learner.noise.add(done, result.squares)
            t.records.step(done, t.run.learning_rate(done - 1), result, noise)
            t.learner.mode.rise.add(result.loss)
            _check_rise(t, done)
            votes = Votes(votes.stop or result.votes.stop, votes.save or result.votes.save)
        return votes

    def end(self) -> Result:
        t, recipe, last, records = self.t, self.t.run.recipe, self._last, self.t.records
        with self._explained():
            is_new = t.start.step < last or not _is_saved(t, last)
            if is_new:
                self._save(last, is_now=True)  # before the evaluation, which may fail
            if self._validation is None:
                self._validation = _validate(t, last)
                if is_new and _is_new_best(t, last):
                    t.best.checkpoint = _path(t, last)
                    t.saver.wait(t.world)
                    t.saver.mark_best(last)
            stopped_early = t.best.has_stalled(recipe.train.stop_after)
            if stopped_early:
                records.say(t.best.stall_message(last))
            test = _evaluate(t, t.learner.data.test, "test", last)
            t.saver.finish(t.world)
            test_of_best = None
            if stopped_early and t.best.step < last and t.best.checkpoint:
                if t.steps.ranks.have_weights:
                    tested = partial(_evaluated, t, t.learner.data.test)
                    test_of_best = evaluate_best(t.world, t.state, t.best, tested, records.say)
                else:
                    records.say(
                        f"the best weights, of step {t.best.step}, are not tested, for other "
                        "processes have the weights, too; firecaffe evaluate "
                        f"{t.best.checkpoint} tests them"
                    )
        _check_updated(t, last)
        if recipe.checkpoint.every or recipe.checkpoint.every_s:
            records.say(t.saver.costs.line)
        result = self._result(test, test_of_best, stopped_early)
        t.learner.update.take_average()
        t.learner.norms.put()
        if t.state.has_all_weights:
            result.hold(t.learner.holding.forward.model)
        for line in result.lines(self._known):
            records.say(line)
        return result

    def _result(
        self, test: Evaluation, test_of_best: Evaluation | None, stopped_early: bool
    ) -> Result:
        t, learner, steps, sums, best = self.t, self.t.learner, self._last, self._sums, self.t.best
        weights_sha256, drifted_ranks = t.state.compare_weights()
        return Result(
            **facts_of_ranks(t.state, sums, steps, t.saver.costs, learner.doubts),
            steps=steps,
            timed_samples=sums.samples,
            timed_s=sums.train_s,
            images_per_s=share(sums.samples, sums.train_s),
            loss=sums.loss,
            test_loss=test.loss,
            metrics=test.metrics,
            measure=best.measure,
            shares=test.shares,
            largest_class_share=test.largest_class_share,
            validation=None if self._validation is None else self._validation.metrics,
            best=best.row,
            stopped_early=stopped_early,
            test_of_best=None if test_of_best is None else {"step": best.step, **test_of_best.row},
            noise_scale=learner.noise.row,
            evaluated="ema" if "ema" in t.state.pieces else "weights",
            test_samples=test.samples,
            weights_sha256=weights_sha256,
            state_sha256=t.state.sha256(),
            drifted_ranks=drifted_ranks,
            folder=t.folder,
        )

    def _explained(self) -> AbstractContextManager[None]:
        t, folder = self.t, self.t.folder / "checkpoints"
        resumed = None if t.start.checkpoint is None else t.start.checkpoint.folder
        return explained(t.world, t.saver, folder, resumed, t.run.learning_rate)


def _is_due(run: Run, every: int, done: int) -> bool:
    # What falls due during a round of replicas is done at its end, when the state is whole again.
    return bool(every) and done // every > run.rounds.last_whole(done) // every


def _needs_state(run: Run, done: int) -> bool:
    # Whether the state after this step is needed, with all losses so far.
    recipe = run.recipe
    is_due = any(_is_due(run, n, done) for n in (recipe.checkpoint.every, recipe.train.eval_every))
    return run.rounds.is_whole(done) and (done == run.steps or is_due or recipe.run.digests)


def _save(t: Training, done: int) -> None:
    t.steps.ranks.gather()
    _check_scale(t, done)
    _estimate_norms(t, done)
    about = Checkpoint(
        step=done,
        identity=dict(t.run.deciding),
        probe=t.learner.probe.digest,
        doubts=list(t.learner.doubts),
    )
    marks = []
    if _is_new_best(t, done):
        t.best.checkpoint = _path(t, done)
        marks.append(BEST)
    if t.learner.mode.rise.record_save():
        marks.append(GOOD)
    t.saver.save(about, t.state, marks)


def _is_saved(t: Training, done: int) -> bool:
    # False if another run was resumed at its end. Only rank 0 is sure to see the folder.
    return bool(broadcast_text(t.world, "yes" if Path(_path(t, done)).is_dir() else ""))


def _check_rise(t: Training, done: int) -> None:
    if line := t.learner.mode.rise.line:
        error = DivergedError(f"{line}; {t.steps.stepper.advice}")
        error.step = done
        raise error


def _check_scale(t: Training, done: int) -> None:
    # Each replica has a scale of its own.
    scaler = t.learner.holding.forward.scaler
    if scaler.is_enabled() and 0.0 in gather_json(t.world, scaler.get_scale()):
        raise _untrained(t, done, "has come to 0, so that nothing is trained any more", "none")


def _check_updated(t: Training, done: int) -> None:
    # Ranks without replicas, or beside a server, make no updates themselves.
    scaler = t.learner.holding.forward.scaler
    if scaler.is_enabled() and done and not any(gather_json(t.world, scaler.has_updated)):
        what = f"has skipped the updates of all {done} steps, for a gradient was not finite in each"
        advice = "none, or more steps if these are few"
        raise _untrained(t, done, f"{what} of them, so that nothing was trained", advice)


def _untrained(t: Training, done: int, what: str, advice: str) -> NotFiniteError:
    error = NotFiniteError(f"float16's loss scale {what}; try train.autocast bfloat16 or {advice}")
    error.step, error.is_secondary = done, not t.world.is_first
    return error


def _path(t: Training, done: int) -> str:
    return str(t.folder / "checkpoints" / checkpoint_name(done))


def _is_new_best(t: Training, done: int) -> bool:
    # Whether the step's evaluation is the best so far, and its checkpoint is to be kept.
    return t.run.recipe.checkpoint.best and t.best.step == done == t.best.evaluated


def _validate(t: Training, done: int) -> Evaluation | None:
    validation = t.learner.data.validation
    if validation is None:
        return None
    evaluation = _evaluate(t, validation, "validation", done)
    if t.world.is_first and t.state.has_all_weights:
        t.records.weights(done, weights_digest(t.state.tensors_held_by_all(WEIGHTS)))
    if t.best.evaluated != done:  # else the run was resumed from there
        t.best.add(done, evaluation)
    return evaluation


def _evaluate(t: Training, dataset: Dataset, split: str, done: int) -> Evaluation:
    t.steps.ranks.gather()
    _estimate_norms(t, done)
    evaluation = _evaluated(t, dataset)
    t.records.evaluation(split, done, evaluation)
    return evaluation


def _evaluated(t: Training, dataset: Dataset) -> Evaluation:
    learner, recipe, ranks = t.learner, t.run.recipe, t.steps.ranks
    forward = learner.holding.forward
    with (
        learner.update.evaluating(),
        learner.norms.in_place(),
        ranks.turn,
        t.world.traffic.uncounted(),
    ):
        return evaluate(
            forward.model,
            forward.task,
            dataset,
            recipe.data,
            recipe.train,
            t.groups.evaluators,
            outputs_of=partial(learner.holding.outputs, num_samples=len(dataset)),
            result_group=t.groups.result_group,
        )


def _estimate_norms(t: Training, done: int) -> None:
    norms, ahead = t.learner.norms, t.steps.ahead
    if norms.is_for_step(done):
        return
    ahead.close()  # a data set may not allow two readers
    with t.steps.ranks.turn, t.world.traffic.uncounted(), t.learner.update.evaluating():
        norms.estimate(t.groups.estimators, done)
    ahead.go_on(ahead.leaves, done)
