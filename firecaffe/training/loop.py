"""The training loop, from the first step to the result."""

import time
from collections import deque
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.world import World
from firecaffe.data import Data, Dataset
from firecaffe.data.train_batches import BatchesAhead
from firecaffe.errors import CheckpointError, FirecaffeError, LauncherLostError, PreemptedError
from firecaffe.exchange.leaves import Shares
from firecaffe.recipe.run import Run
from firecaffe.training.balance import Balance
from firecaffe.training.best import Best
from firecaffe.training.checkpoint import Checkpoint, checkpoint_name
from firecaffe.training.evaluate import Evaluation, evaluate
from firecaffe.training.finite import explained
from firecaffe.training.local.stepper import LocalStepper
from firecaffe.training.local.sums import LocalOutcome
from firecaffe.training.outcome import Outcome, Votes
from firecaffe.training.records import Records
from firecaffe.training.result import Result, StepSums, result_of
from firecaffe.training.saver import Saver
from firecaffe.training.served.stepper import ServedStepper
from firecaffe.training.state import State
from firecaffe.training.step import Stepper
from firecaffe.training.stop import LAUNCHER, StopRequest


@dataclass(frozen=True)
class Training:
    """A run, and the parts that were built for it."""

    run: Run
    world: World
    data: Data
    stepper: Stepper | ServedStepper | LocalStepper
    ahead: BatchesAhead
    """Where the stepper's batches come from."""
    balance: Balance | None
    """What decides about shares; None if they are always equal."""
    state: State
    best: Best
    saver: Saver
    folder: Path
    first_step: int
    """The step from which it goes to the run's last."""
    probe: str
    """The digest of what this machine computes for the probe's micro-batch."""
    doubts: list[str]
    """Reasons why other numbers of workers may not end in the same bits; more may come."""


def train(t: Training, records: Records) -> Result:
    """Trains to the run's last step; all ranks return the same result.

    Raises: PreemptedError if the run was asked to stop, LauncherLostError if its launcher is
    gone; its checkpoint is saved then. NotFiniteError on all ranks.
    """
    run, words = t.run, t.run.recipe
    known, broken = list(t.doubts), [getattr(each, "skipped", {}) for each in t.data.parts.values()]
    sums = StepSums(t.first_step + 1, broken=broken)
    saved_s = time.monotonic()
    queued: deque[Outcome | LocalOutcome] = deque()

    def vote() -> Votes:
        every_s = words.checkpoint.every_s
        is_due = every_s and time.monotonic() - saved_s >= every_s
        return Votes(stop=bool(stop.reason), save=bool(is_due) and t.world.is_first)

    def read(left: int) -> Votes:
        """Reads the outcomes of the queued steps, except the last `left`."""
        votes = Votes()
        while len(queued) > left:
            result = queued.popleft().read(look)
            done = result.timings.step
            t.state.losses.add(result.loss)
            sums.add(result)
            if t.balance is not None:
                t.balance.add(result)
            records.step(done, run.learning_rate(done - 1), result)
            votes = Votes(votes.stop or result.votes.stop, votes.save or result.votes.save)
        return votes

    def look() -> None:
        if t.world.watch is not None:
            t.world.watch.check()

    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        checkpoints = t.folder / "checkpoints"
        stack.enter_context(explained(t.world, t.saver, checkpoints, run.learning_rate))
        last, validation = t.first_step, None
        every = words.train.eval_every
        if last < run.steps and t.best.evaluated < last and _is_due(run, every, last):
            # It was asked to stop before this evaluation.
            validation = _validate(t, last, records)
            if _is_new_best(t, last):
                _save(t, last)
        for step in range(t.first_step, run.steps):
            if t.best.is_enough(words.train.stop_after):
                break
            start, done = time.perf_counter(), step + 1
            last = done
            t.world.place.step = done
            queued.append(t.stepper.run(step, run.learning_rate(step), vote))
            votes = read(0 if _is_looked_at(run, done) else t.stepper.behind)
            if words.run.digests:
                records.digests(done, t.state.digest_each())
            if not run.rounds.is_whole(done):
                sums.add_time(done, time.perf_counter() - start)
                continue
            validation = None
            if done < run.steps and not votes.stop and _is_due(run, every, done):
                begun = time.perf_counter()
                validation = _validate(t, done, records)
                start += time.perf_counter() - begun  # it is no part of the step
            is_end = done == run.steps or t.best.is_enough(words.train.stop_after)
            is_due = _is_due(run, words.checkpoint.every, done) or _is_new_best(t, done)
            if not is_end and (is_due or votes.save or votes.stop):
                read(0)  # what it votes for is done already
                _save(t, done)
                saved_s = time.monotonic()
            if t.balance is not None and done < run.steps and t.balance.is_due(done):
                read(0)  # steps that had these shares
                if said := t.balance.decide(done):
                    _share_out(t, t.balance.shares, done)
                    records.say(said)
            sums.add_time(done, time.perf_counter() - start)
            if done < run.steps and votes.stop:
                reason = stop.reason  # before others may be asked to end
                _finish_saving(t)
                raise _stopped(reason, done, t.folder)
        if t.first_step < last:
            _save(t, last)  # before the evaluation, which may fail
        if validation is None:
            validation = _validate(t, last, records)
            if t.first_step < last and _is_new_best(t, last):
                t.best.checkpoint = _path(t, last)
                t.saver.mark_best(last)
        stopped_early = t.best.is_enough(words.train.stop_after)
        if stopped_early:
            records.say(_no_better(t.best, last))
        test = _evaluate(t, t.data.test, "test", last, records)
        _finish_saving(t)
    if words.checkpoint.every or words.checkpoint.every_s:
        records.say(t.saver.costs.line)
    costs = t.saver.costs
    result = result_of(
        t.world,
        t.state,
        sums,
        last,
        costs,
        t.doubts,
        t.stepper.forward.task.measure,
        validation,
        test,
        t.best,
        stopped_early,
        t.folder,
    )
    if t.stepper.ema is not None:
        t.stepper.ema.exchange()
    result.hold(t.stepper.forward.model)
    for line in result.lines(known):
        records.say(line)
    return result


def _is_due(run: Run, every: int, done: int) -> bool:
    """Whether what is done every so many steps is to be done now. What is due within a round is
    done when the state is whole again.
    """
    return bool(every) and done // every > run.rounds.last_whole(done) // every


def _is_looked_at(run: Run, done: int) -> bool:
    """Whether somebody wants the state as it is after a step, with the losses so far."""
    words = run.recipe
    is_due = any(_is_due(run, n, done) for n in (words.checkpoint.every, words.train.eval_every))
    return run.rounds.is_whole(done) and (done == run.steps or is_due or words.run.digests)


def _share_out(t: Training, shares: Shares, done: int) -> None:
    """Gives the ranks other shares of the steps after `done`."""
    assert isinstance(t.stepper, Stepper)  # no other has shares
    leaves = t.run.route.order(t.run.num_leaves, shares[t.world.rank])
    t.stepper.reducer.share_out(shares)
    t.stepper.leaves = leaves
    t.ahead.go_on(leaves, done)


def _save(t: Training, done: int) -> None:
    about = Checkpoint(
        step=done, identity=dict(t.run.deciding), probe=t.probe, doubts=list(t.doubts)
    )
    is_best = _is_new_best(t, done)
    if is_best:
        t.best.checkpoint = _path(t, done)
    t.saver.save(about, t.state, is_best)


def _path(t: Training, done: int) -> str:
    return str(t.folder / "checkpoints" / checkpoint_name(done))


def _is_new_best(t: Training, done: int) -> bool:
    """Whether the evaluation after a step is the best so far, and its checkpoint is to be kept."""
    return t.run.recipe.checkpoint.best and t.best.step == done == t.best.evaluated


def _no_better(best: Best, last: int) -> str:
    shown = "none" if best.value is None else best.measure.shown(best.value)
    return (
        f"stopped early, after step {last}: {best.without} evaluations came to no better "
        f"{best.measure.words} than {shown}, after step {best.step} (train.stop_after)"
    )


def _finish_saving(t: Training) -> None:
    """Waits on all ranks until rank 0 has the last checkpoint on the disk. Nobody leaves before,
    for if one rank leaves, the launcher ends the others.

    Raises: CheckpointError, on all ranks, if it is not there.
    """
    problem = ""
    try:
        t.saver.finish()
    except CheckpointError as error:
        problem = str(error)
    said = gather_text(t.world, problem)
    if said[0]:
        unsaved = CheckpointError(said[0])
        unsaved.goes_along = not t.world.is_first  # which alone writes
        raise unsaved


def _stopped(reason: str, done: int, folder: Path) -> FirecaffeError:
    words = (
        f"stopped after step {done} ({reason or 'another rank was asked to'}); "
        f"a checkpoint is saved, resume with --resume {folder}"
    )
    if reason == LAUNCHER:
        return LauncherLostError(words)
    error = PreemptedError(words)
    error.goes_along = not reason
    return error


def _validate(t: Training, done: int, records: Records) -> Evaluation | None:
    if t.data.validation is None:
        return None
    found = _evaluate(t, t.data.validation, "validation", done, records)
    if t.best.evaluated != done:  # else it was resumed from there
        t.best.add(done, found)
    return found


def _evaluate(t: Training, dataset: Dataset, split: str, done: int, records: Records) -> Evaluation:
    forward, words = t.stepper.forward, t.run.recipe
    averaged = nullcontext() if t.stepper.ema is None else t.stepper.ema.in_place()
    with averaged:
        found = evaluate(forward.model, forward.task, dataset, words.data, words.train, t.world)
    records.evaluation(split, done, found)
    return found
