"""A run's progress for a person: a live line in a terminal, plain lines elsewhere."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from firecaffe.output import kept_stdout
from firecaffe.runs.measure import Measure
from firecaffe.training.evaluate import Evaluation
from firecaffe.training.outcome import StepResult

LINES = 10
"""The number of progress lines of a run without a terminal."""


def say(line: str) -> None:
    """Prints a plain line, after the live one has ended."""
    Console(file=kept_stdout(), soft_wrap=True).print(line, markup=False, highlight=False)


def in_words(metrics: Mapping[str, float], shares: Sequence[str]) -> str:
    """Formats metrics for people: shares in per cent, others as they are."""
    found = [(Measure(name, is_share=name in shares), value) for name, value in metrics.items()]
    return "".join(f"{each.words} {each.shown(value)}, " for each, value in found)


class RunProgress:
    """Shows steps, loss, learning rate, samples/s and the time left. Silent on other ranks."""

    def __init__(self, title: str, first_step: int, steps: int, shown: bool) -> None:
        self._console = Console(file=kept_stdout(), quiet=not shown, soft_wrap=True)
        self._title, self._first_step, self._steps = title, first_step, steps
        self._stride = max(1, (steps - first_step) // LINES)
        # Of the steps themselves: those of a local round are told together, at its end.
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
        """Prints a plain line above the live one."""
        self._live.console.print(line, markup=False, highlight=False)

    def step(self, step: int, learning_rate: float, result: StepResult) -> None:
        """Shows the result of step `step`, counted from 1."""
        self._samples += result.samples
        self._steps_s += result.timings.step_s
        rate = self._samples / max(self._steps_s, 1e-9)
        numbers = f"loss {result.loss:.4f}  lr {learning_rate:.4g}  {rate:,.0f} samples/s"
        self._live.update(self._task, completed=step, numbers=f"step {step}  {numbers}")
        if not self._console.is_terminal and (step % self._stride == 0 or step == self._steps):
            left_s = self._steps_s / (step - self._first_step) * (self._steps - step)
            self.say(f"{self._title}  step {step}/{self._steps}  {numbers}  {left_s:,.0f} s left")

    def evaluation(self, split: str, step: int, result: Evaluation) -> None:
        """Shows an evaluation at step `step`, on the samples of a split."""
        self.say(
            f"{self._title}  {split} at step {step}: {in_words(result.metrics, result.shares)}"
            f"loss {result.loss:.4f} ({result.samples:,} samples)"
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()
