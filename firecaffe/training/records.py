"""Records of a running training: lines for people, rows for programs, timings of first steps."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from firecaffe.cluster.world import World
from firecaffe.output import kept_stdout
from firecaffe.recipe.run import Run
from firecaffe.recipe.sections import flatten
from firecaffe.runs.measure import Measure
from firecaffe.runs.record import JsonLines, Loggers, Metrics
from firecaffe.runs.run_folder import DIGESTS, WEIGHTS
from firecaffe.training.evaluation import Evaluation
from firecaffe.training.outcome import StepResult, Timings

FIRST = 20
WARM_UP = 4
"""The first steps, which are left out: memory is allocated, and kernels are chosen."""

Use = Callable[[Sequence[dict[str, Any]]], str]
"""Takes rows of timings, and returns a line to print, or an empty one."""


class FirstSteps:
    def __init__(self, steps: int, use: Use | None) -> None:
        # steps: how many follow. A forecast after the last of them would be of no use.
        self._use = use if steps > FIRST else None
        self._rows: list[dict[str, Any]] = []

    def add(self, timings: Timings) -> None:
        if self._use is not None:
            self._rows.append(asdict(timings))

    def hand_over(self) -> str:
        """Pass the timings on once all are there, and return the line about them."""
        if self._use is None or len(self._rows) < FIRST:
            return ""
        use, self._use = self._use, None
        return use(self._rows[WARM_UP:FIRST])


# progress lines of a run without a terminal
LINES = 10


def say(line: str) -> None:
    """Print a plain line, once there is no live progress line."""
    console = Console(file=kept_stdout(), soft_wrap=True, force_jupyter=False)
    console.print(line, markup=False, highlight=False)


def in_words(metrics: Mapping[str, float], shares: Sequence[str]) -> str:
    measured = [(Measure(name, is_share=name in shares), value) for name, value in metrics.items()]
    return "".join(f"{measure.words} {measure.shown(value)}, " for measure, value in measured)


class RunProgress:
    """Shows steps, loss, learning rate, samples/s and the time left. Silent on other ranks."""

    def __init__(self, title: str, first_step: int, steps: int, shown: bool) -> None:
        out = kept_stdout()
        # Notebooks set FORCE_COLOR for their children, but that does not make a pipe a terminal. In
        # a notebook itself, rich would make each line a display of its own, and not print to `out`.
        self._console = Console(
            file=out,
            quiet=not shown,
            soft_wrap=True,
            force_terminal=out.isatty(),
            force_jupyter=False,
        )
        self._title, self._first_step, self._steps = title, first_step, steps
        self._stride = max(1, (steps - first_step) // LINES)
        # Of the steps' own times: the steps of a local round are reported together, at its end.
        self._steps_s, self._samples = 0.0, 0
        self._live = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not (shown and self._console.is_terminal),
        )
        self._task = self._live.add_task(title, total=steps, completed=first_step, numbers="")

    def say(self, line: str) -> None:
        self._live.console.print(line, markup=False, highlight=False)

    def step(self, step: int, learning_rate: float, result: StepResult) -> None:
        self._samples += result.samples
        self._steps_s += result.timings.step_s
        rate = self._samples / max(self._steps_s, 1e-9)
        numbers = f"loss {result.loss:.4f}  lr {learning_rate:.4g}  {rate:,.0f} samples/s"
        self._live.update(self._task, completed=step, numbers=f"step {step}  {numbers}")
        if not self._console.is_terminal and (step % self._stride == 0 or step == self._steps):
            left_s = self._steps_s / (step - self._first_step) * (self._steps - step)
            self.say(f"{self._title}  step {step}/{self._steps}  {numbers}  {left_s:,.0f} s left")

    def evaluation(self, split: str, step: int, result: Evaluation) -> None:
        self.say(
            f"{self._title}  {split} at step {step}: {in_words(result.metrics, result.shares)}"
            f"loss {result.loss:.4f} ({result.samples:,} samples)"
        )
        if not math.isfinite(result.loss):
            self.say(
                f"warning: the {split} loss at step {step} is {result.loss}, while the training's "
                "was finite: look at statistics that only evaluations use, as BatchNorm's; "
                "train.batch_norm_samples estimates them from training samples"
            )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()


class Records:
    def __init__(
        self,
        folder: Path,
        run: Run,
        world: World,
        first_step: int,
        goes_on: bool,
        use_first: Use | None = None,
    ) -> None:
        # goes_on: whether rows follow those of an earlier attempt at this run. use_first: takes the
        # timings of the first steps, and returns a line.
        self._first_steps = FirstSteps(run.steps - first_step, use_first)
        self._title, self._watch = run.title, world.watch
        self._metrics, self._weights, self._digests = None, None, None
        self._loggers = None
        with ExitStack() as opened:
            enter = opened.enter_context
            shown = world.is_first
            self._progress = enter(RunProgress(run.title, first_step, run.steps, shown=shown))
            timings = folder / "timings"
            self._timings = enter(JsonLines(timings / f"rank-{world.rank}.jsonl", goes_on))
            self._trips = enter(JsonLines(timings / f"round-trips-{world.rank}.jsonl", goes_on))
            if world.is_first:
                after = first_step if goes_on else None
                config = run.recipe.run
                self._loggers = Loggers(config.loggers, self.say)
                opened.callback(self._loggers.end, None)
                self._loggers.begin(folder, run.title, flatten(run.recipe))
                self._metrics = enter(Metrics(folder, config.tensorboard, after, self._loggers))
                self._weights = enter(JsonLines(folder / WEIGHTS, goes_on))
                if run.recipe.run.digests:
                    self._digests = enter(JsonLines(folder / DIGESTS, goes_on))
            self._opened = opened.pop_all()

    def say(self, line: str) -> None:
        self._progress.say(f"{self._title}  {line}")

    def step(
        self, done: int, learning_rate: float, result: StepResult, noise: Mapping[str, float]
    ) -> None:
        """Record step `done`, counted from 1. `noise`: the numbers of the noise scale, if any."""
        timings = asdict(result.timings).items()
        self._timings.write({name: seconds for name, seconds in timings if seconds is not None})
        for trip in self._watch.take_round_trips():
            self._trips.write(asdict(trip))
        self._first_steps.add(result.timings)
        self._progress.step(done, learning_rate, result)
        if self._metrics is not None:
            numbers = {
                "learning_rate": learning_rate,
                "samples": result.samples,
                "loss": result.loss,
                **result.metrics,
                "images_per_s": result.samples / result.timings.step_s,
                **noise,
            }
            self._metrics.write("train", done, numbers)

    def between_steps(self) -> None:
        """Do what takes longer than writing a row, outside of any step's time."""
        if line := self._first_steps.hand_over():
            self.say(line)

    def weights(self, done: int, sha256: str) -> None:
        """Record the digest of the weights after step `done`. Any thread may call it."""
        if self._weights is not None:
            self._weights.write({"step": done, "sha256": sha256})

    def digests(self, done: int, digests: dict[str, str]) -> None:
        if self._digests is not None:
            self._digests.write({"step": done, "tensors": digests})

    def evaluation(self, split: str, done: int, evaluation: Evaluation) -> None:
        self._progress.evaluation(split, done, evaluation)
        if self._metrics is not None:
            self._metrics.write(split, done, evaluation.row)

    def end(self, result: Mapping[str, Any]) -> None:
        """Pass the content of result.json to loggers, on rank 0."""
        if self._loggers is not None:
            self._loggers.end(result)

    def close(self) -> None:
        self._opened.close()
