"""Runs of one recipe over seeds, as rows of FireCaffe's table 2, each against a baseline.

Two runs are of one group where every word but the seed, and the number and kind of workers, are the
same. Runs of one seed that ended in the same weights are one result: their accuracies count once (a
repetition on other workers is no new seed), their times each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from firecaffe.runs.compare import Run, names, other_work, samples_seen
from firecaffe.runs.curves import time_to
from firecaffe.runs.statistics import DIFFERENT, Difference, Mean, differences, mean_of

HARDWARE = ("environment.cpu", "environment.gpus", "environment.cores")
NOT_OF_A_GROUP = ("train.seed", "environment.host", "environment.commit")


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone."""

    runs: list[Run]
    names: list[str]

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def results(self) -> list[Run]:
        """One run for each result: the first of those that ended in the same weights. (Those of
        another seed are another result all the same: trainings that fail may end alike.)
        """
        found: dict[tuple[Any, str], Run] = {}
        for run in self.runs:
            found.setdefault((run.words.get("train.seed"), run.result["weights_sha256"]), run)
        return list(found.values())


@dataclass(frozen=True)
class GroupRow:
    """A line of the table. Fractions are of 1."""

    runs: list[str]
    """The folders that the figures are from."""
    seeds: int
    hardware: str
    net: str
    epochs: float | None
    """None where the run does not say how many samples an epoch has."""
    global_batch_size: int
    initial_lr: float
    time_s: Mean
    """Of training, without evaluations and checkpoints; to the target, where there is one."""
    speedup: float | None
    unequal: list[str]
    """In what the work was not the first group's."""
    why_no_speedup: str
    """Empty where there is one."""
    top1: Mean
    top5: Mean | None
    against: Difference | None
    """top-1 less the baseline's; None for the baseline."""

    @property
    def is_worse(self) -> bool:
        """Whether it is shown to have a lower top-1 than the baseline."""
        against = self.against
        return against is not None and against.verdict == DIFFERENT and against.value < 0


def letters(count: int) -> list[str]:
    """What groups are called."""
    return [chr(ord("A") + number) if number < 26 else str(number) for number in range(count)]


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """In the order in which each group's first run was given."""
    found: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        found.setdefault(_key(run), []).append(place)
    called = names(runs)
    return [
        Group([runs[place] for place in places], [called[place] for place in places])
        for places in found.values()
    ]


def _key(run: Run) -> str:
    words = {
        word: value
        for word, value in run.words.items()
        if word not in NOT_OF_A_GROUP and not word.startswith(("run.", "checkpoint."))
    }
    done = [run.result[name] for name in ("world_size", "steps", "data")]
    return repr((sorted(words.items(), key=lambda each: each[0]), done))


def group_rows(
    groups: Sequence[Group], target: float | None = None, allow_unequal: bool = False
) -> list[GroupRow]:
    """Against the first group. target: a top-1 accuracy; times are then those until an evaluation
    has reached it. allow_unequal: give speedups between runs of other work too.

    Raises: RunError where a target is asked for and a run's metrics cannot be read.
    """
    baseline = groups[0]
    base_times = _times(baseline, target)
    rows = []
    top1s = [[run.result["top1"] for run in group.results] for group in groups]
    against = differences(top1s[0], top1s[1:])
    for place, group in enumerate(groups):
        times = _times(group, target)
        unequal = _unequal(baseline, group, target)
        speedup, why = None, ""
        if not times or not base_times:
            missed = (group if not times else baseline).names[0]
            why = f"{missed} did not reach {target:.2%}" if target else f"{missed} has no rate"
        elif unequal and not allow_unequal:
            why = f"not the same work ({', '.join(unequal)})"
        else:
            speedup = fmean(base_times) / fmean(times)
        results = group.results
        top5 = [run.result["top5"] for run in results if "top5" in run.result]
        rows.append(
            GroupRow(
                runs=[str(run.folder) for run in group.runs],
                seeds=len(results),
                hardware=_hardware(group.first),
                net=str(group.first.words["model.name"]),
                epochs=_epochs(group.first),
                global_batch_size=int(group.first.words["train.global_batch_size"]),
                initial_lr=_initial_lr(group.first),
                time_s=mean_of(times) if times else Mean(float("nan"), float("nan"), 0),
                speedup=speedup,
                unequal=unequal,
                why_no_speedup=why,
                top1=mean_of(top1s[place]),
                top5=mean_of(top5) if len(top5) == len(results) else None,
                against=against[place - 1] if place else None,
            )
        )
    return rows


def _times(group: Group, target: float | None) -> list[float]:
    """Of each run; none where one of them has none, for a mean of the others would flatter."""
    if target is not None:
        found = [time_to(run, target) for run in group.runs]
        return [] if None in found else [each for each in found if each is not None]
    rates = [run.result["images_per_s"] for run in group.runs]
    if not all(rates):
        return []
    return [samples_seen(run) / rate for run, rate in zip(group.runs, rates, strict=True)]


def _unequal(baseline: Group, group: Group, target: float | None) -> list[str]:
    """In what the work differs. Towards a target, how long each took is the question itself."""
    unequal = other_work(baseline.first, group.first)
    return [each for each in unequal if target is None or each != "samples seen"]


def _hardware(run: Run) -> str:
    gpus = run.words.get("environment.gpus") or []
    workers = run.result["world_size"]
    kind = gpus[0] if gpus else f"{run.words.get('environment.cpu')} core"
    return f"{workers} x {kind}"


def _epochs(run: Run) -> float | None:
    """From the data's own line: "NAME: N training and …"."""
    words = str(run.result["data"]).split()
    numbers = [int(word) for word in words if word.isdigit()]
    return samples_seen(run) / numbers[0] if numbers else None


def _initial_lr(run: Run) -> float:
    value: Any = run.result.get("initial_lr", run.words["solver.base_lr"])
    return float(value)
