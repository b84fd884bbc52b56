"""One pass through a scheme's rounds, to a file and what that is worth."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from firecaffe.compression.fcz import FileReport
from firecaffe.compression.transfer import BYTES_PER_WEIGHT
from firecaffe.files import write_json
from firecaffe.recipe.sections import Recipe
from firecaffe.runs.folder import read_run_file
from firecaffe.shrink.code import write_network
from firecaffe.shrink.judge import Judge, Worth
from firecaffe.shrink.layers import Choice
from firecaffe.shrink.rounds import rounds_of
from firecaffe.shrink.scheme import Scheme
from firecaffe.training.load import load_run
from firecaffe.training.trial import Trial, run_trials

FILE = "net.fcz"
"""The file's name in the folder of its rounds."""


@dataclass(frozen=True)
class RoundDone:
    """A round that has been trained."""

    name: str
    folder: Path
    steps: int
    test: float
    """The metric on the test samples, of the network before it is written."""


@dataclass(frozen=True)
class Made:
    """A file, and how it was made."""

    path: Path
    report: FileReport
    rounds: Sequence[RoundDone]
    worth: Worth
    """Of the network that was decoded from the file."""
    lost: Worth
    """What it has lost against the float network, in the unit that people read."""
    ratio: float
    """4 bytes for each weight over the bytes of the whole file."""

    @property
    def as_row(self) -> dict[str, Any]:
        """The file in numbers, for JSON."""
        return {
            "file": str(self.path),
            "bytes": self.report.num_bytes,
            "ratio": self.ratio,
            "decoded": asdict(self.worth),
            "lost": asdict(self.lost),
        }


@dataclass(frozen=True)
class Maker:
    """What all passes have in common."""

    recipe: Recipe
    """With `model.weights`, the trained weights."""
    scheme: Scheme
    steps: int
    """Steps of the run."""
    weights: int
    """Of the network."""
    before: Worth
    """Of the float network."""
    judge: Judge
    workers: int
    lock: int
    say: Callable[[str], None]

    def make(self, folder: Path, choice: Choice | None = None) -> Made:
        """Trains the rounds that the folder does not have yet, writes the file, reads it back and
        evaluates what was read.

        choice: of layers, in place of the scheme's words.

        Raises: what `run_trials` and `load` raise.
        """
        folder.mkdir(parents=True, exist_ok=True)
        measure = self.judge.measure
        trials = rounds_of(self.recipe, self.scheme, self.steps, folder, choice, measure)
        train = partial(run_trials, at_once=1, workers=self.workers, lock=self.lock)
        rounds = []
        for trial in trials:
            train([trial], say=lambda _: None)
            rounds.append(self._done(trial))
        # By the recipe that was checked, not by the folder's: it may have come with the run.
        trained = load_run(trials[-1].folder, recipe=trials[-1].recipe)
        path = folder / FILE
        report = write_network(trained, self.scheme, path)
        worth = self.judge.worth(load_run(path, recipe=trained.recipe).model)
        lost = self.before.less(worth, measure)
        ratio = self.weights * BYTES_PER_WEIGHT / report.num_bytes
        made = Made(path, report, rounds, worth, lost, ratio)
        write_json(path.with_suffix(".json"), made.as_row)
        return made

    def _done(self, trial: Trial) -> RoundDone:
        result = read_run_file(trial.folder, "result.json")
        measure = self.judge.measure
        test = measure.value_in(result)
        self.say(f"{trial.folder}: test {measure.words} {measure.shown(test)}")
        return RoundDone(trial.name, trial.folder, result["steps"], test)
