"""Runs of one recipe over seeds, as rows of FireCaffe's table 2, each against a baseline.

Two runs are of one group if they are equal except for the seed: in the recipe, the number and kind
of workers, the code and torch's version. Runs of one seed with the same final weights are one
result: their accuracy counts once, because a repetition on other workers is no new seed. Each of
their times counts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from firecaffe.runs.curves import (
    given_up,
    is_simulated,
    mode_of,
    sent_per_step,
    staleness_of,
    time_to,
    trained_samples,
)
from firecaffe.runs.measure import Measure, failure, other_metrics
from firecaffe.runs.run_table import (
    OWN_CODE,
    TableRun,
    differing_words,
    names,
    other_work,
    samples_seen,
)
from firecaffe.runs.statistics import (
    BAND,
    DIFFERENT,
    RELATIVE_BAND,
    Difference,
    Mean,
    Ratio,
    as_gain,
    differences,
    mean_of,
    ratios,
)

T = TypeVar("T")

IGNORED_IN_GROUPS = ("train.seed", "environment.host", "environment.commit", "environment.source")


@dataclass(frozen=True)
class RunGroup:
    runs: list[TableRun]
    names: list[str]

    @property
    def first(self) -> TableRun:
        return self.runs[0]

    @property
    def results(self) -> list[TableRun]:
        # Runs of different seeds stay different results: failed trainings may end in equal weights.
        distinct: dict[tuple[str, str], TableRun] = {}
        for run in self.runs:
            seed = repr(run.words.get("train.seed"))  # read from a file, which may say anything
            distinct.setdefault((seed, run.result["weights_sha256"]), run)
        return list(distinct.values())


@dataclass(frozen=True)
class GroupRow:
    """A row of the table. Shares are fractions of 1."""

    runs: list[str]
    seeds: int
    hardware: str
    net: str
    epochs: float | None
    """None if the run does not record the number of samples of one."""
    global_batch_size: int
    initial_lr: float
    time_s: Mean
    """Seconds of training, without evaluations and checkpoints; to the target, if there is one."""
    speedup: Ratio | None
    unequal: list[str]
    why_no_speedup: str
    measure: Measure
    value: Mean
    others: dict[str, Mean]
    shares: list[str]
    mode: str
    test_loss: Mean | None
    """None if it was not finite in a run."""
    staleness: Mean | None
    """Mean of the gradients; None without a server."""
    given_up: float
    """Mean share of samples that were dropped."""
    sent_bytes: float | None
    """The mean bytes that all ranks together sent in the training; None if unknown."""
    idle_by_stage: list[float]
    """The mean share of a step for which each stage idles; empty without stages."""
    idle_if_equal: float | None
    """The share for which stages of equal work would idle; None without stages."""
    failure: str
    """Which runs learned nothing; empty if all did or their records do not show it."""
    against: Difference | None
    """The difference from the baseline; None for it, after a failure, or for unlike metrics."""

    @property
    def is_worse(self) -> bool:
        gain = self.gain
        return gain is not None and gain.verdict == DIFFERENT and gain.value < 0

    @property
    def gain(self) -> Difference | None:
        return self.against and as_gain(self.against, self.measure.higher_is_better)


def band_of(groups: Sequence[RunGroup], band: float | None) -> float:
    """Return `band`; by default BAND of a share, RELATIVE_BAND of another metric's first mean."""
    if band is not None:
        return band
    first = groups[0]
    if first.first.measure.is_share:
        return BAND
    return RELATIVE_BAND * abs(fmean(run.value for run in first.results))


def letters(count: int) -> list[str]:
    return [chr(ord("A") + number) if number < 26 else str(number) for number in range(count)]


def lettered(of_groups: Sequence[T]) -> Iterable[tuple[str, T]]:
    return zip(letters(len(of_groups)), of_groups, strict=True)


def group_runs(runs: Sequence[TableRun]) -> list[RunGroup]:
    """Group runs, in the order in which each group's first run was given."""
    by_key: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        by_key.setdefault(_key(run), []).append(place)
    called = names(runs)
    return [
        RunGroup([runs[place] for place in places], [called[place] for place in places])
        for places in by_key.values()
    ]


def code_of(run: TableRun) -> str:
    """Return the digest of a run's source (of older runs, the commit) and of a user's own code."""
    ours = run.words.get("environment.source") or run.words.get("environment.commit") or ""
    code_words = sorted(word for word in run.words if word.startswith(OWN_CODE))
    return ", ".join(
        [str(ours), *(f"{word[len(OWN_CODE) :]} {run.words[word]}" for word in code_words)]
    )


def _key(run: TableRun) -> str:
    settings = {
        word: value
        for word, value in run.words.items()
        if word not in IGNORED_IN_GROUPS and not word.startswith(("run.", "checkpoint."))
    }
    done = [code_of(run), *(run.result[name] for name in ("world_size", "steps", "data"))]
    return repr((sorted(settings.items(), key=lambda item: item[0]), done))


def differing_conditions(runs: Sequence[TableRun]) -> list[str]:
    conditions = [
        word
        for word in differing_words(runs)
        if word.startswith("environment.") and word not in IGNORED_IN_GROUPS
    ]
    return [*conditions, *(["the code"] if len({code_of(run) for run in runs}) > 1 else [])]


def differing(groups: Sequence[RunGroup]) -> dict[str, list[Any]]:
    firsts = [group.first for group in groups]
    entries = differing_words(firsts)
    workers = [run.result["world_size"] for run in firsts]
    if len(set(workers)) > 1:
        entries["workers"] = workers
    if len({code_of(run) for run in firsts}) == 1:
        entries.pop("environment.commit", None)  # the same source under another commit
    return {word: values for word, values in entries.items() if word not in WORDS_OF_ONE_RUN}


WORDS_OF_ONE_RUN = ("train.seed", "environment.host")


def group_rows(
    groups: Sequence[RunGroup],
    target: float | None = None,
    allow_unequal: bool = False,
    band: float | None = None,
) -> list[GroupRow]:
    """Return the rows of a table of groups, compared with the first one.

    With a `target` for the metric, times are those until an evaluation has reached it. Raises
    RunError if a run's metrics cannot be read.
    """
    times = [_times(group, target) for group in groups]
    against = _against(groups, band_of(groups, band))
    why = [_why_no_speedup(groups, times, place, target) for place in range(len(groups))]
    unequal = [_unequal(groups[0], group, target) for group in groups]
    for place, parts in enumerate(unequal):
        if parts and not why[place] and not allow_unequal:
            why[place] = f"not the same work ({', '.join(parts)})"
    speedups = _speedups(times, [not reason for reason in why])
    return [
        _row(group, times[place], speedups[place], unequal[place], why[place], against[place])
        for place, group in enumerate(groups)
    ]


def _row(
    group: RunGroup,
    times: Sequence[float],
    speedup: Ratio | None,
    unequal: list[str],
    why: str,
    against: Difference | None,
) -> GroupRow:
    results, words = group.results, group.first.words
    measure, others = group.first.measure, other_metrics(group.first.result)
    return GroupRow(
        runs=[str(run.folder) for run in group.runs],
        seeds=len(results),
        hardware=_hardware(group.first),
        net=str(words["model.name"]),
        epochs=_epochs(group.first),
        global_batch_size=int(words["train.global_batch_size"]),
        initial_lr=float(group.first.result.get("initial_lr", words["solver.base_lr"])),
        time_s=mean_of(times) if times else Mean(float("nan"), float("nan"), 0),
        speedup=speedup,
        unequal=unequal,
        why_no_speedup=why,
        measure=measure,
        value=mean_of([measure.value_in(run.result) for run in results]),
        others={
            other.name: mean_of([other.value_in(run.result) for run in results])
            for other in others
            if all(isinstance(run.result.get(other.name), int | float) for run in results)
        },
        shares=[other.name for other in others if other.is_share],
        mode=mode_of(group.first),
        test_loss=_mean([run.result.get("test_loss") for run in results]),
        staleness=_mean([staleness_of(run) for run in results]),
        given_up=fmean(given_up(run) / max(1, samples_seen(run)) for run in results),
        sent_bytes=_sent(group.runs),
        idle_by_stage=_idle_by_stage(group.runs),
        idle_if_equal=(group.first.result.get("parallel") or {}).get("idle_if_equal"),
        failure=_failure(group),
        against=against,
    )


def _mean(values: Sequence[float | None]) -> Mean | None:
    # If one value is unknown, a mean of the others would look too good.
    known = [float(value) for value in values if value is not None]
    return mean_of(known) if len(known) == len(values) else None


def _sent(runs: Sequence[TableRun]) -> float | None:
    sent = [(sent_per_step(run), run.result["steps"]) for run in runs]
    known = [per_step * steps for per_step, steps in sent if per_step is not None]
    return fmean(known) if len(known) == len(sent) else None


def _idle_by_stage(runs: Sequence[TableRun]) -> list[float]:
    by_run = [run.result.get("idle_by_stage") or [] for run in runs]
    same = len({len(idle) for idle in by_run}) == 1
    return [fmean(of_runs) for of_runs in zip(*by_run, strict=True)] if same else []


def _failure(group: RunGroup) -> str:
    return failure([run.result for run in group.results])


def _against(groups: Sequence[RunGroup], band: float) -> list[Difference | None]:
    compared: list[Difference | None] = [None] * len(groups)
    measure = groups[0].first.measure
    whole = [
        place
        for place, group in enumerate(groups)
        if not _failure(group) and group.first.measure == measure
    ]
    if 0 not in whole:
        return compared
    first, *others = ([run.value for run in groups[place].results] for place in whole)
    for place, difference in zip(whole[1:], differences(first, others, band), strict=True):
        compared[place] = difference
    return compared


def _why_no_speedup(
    groups: Sequence[RunGroup], times: Sequence[Sequence[float]], place: int, target: float | None
) -> str:
    for index in dict.fromkeys((place, 0)):
        name = letters(len(groups))[index]
        if _failure(groups[index]):
            return f"{name} has failed"
        if is_simulated(groups[index].first):
            return f"{name} ran under the simulated clock, in one process"
        if not times[index]:
            name = groups[index].names[0]
            if any(map(_goes_on, groups[index].runs)):
                return f"{name} goes on from another run, whose time it does not have"
            if target is None:
                return f"{name} has no rate"
            return f"{name} did not reach {groups[0].first.measure.shown(target)}"
    return ""


def _speedups(times: Sequence[Sequence[float]], has_one: Sequence[bool]) -> list[Ratio | None]:
    speedups: list[Ratio | None] = [None] * len(times)
    if has_one[0]:
        speedups[0] = Ratio(1.0, 1.0, 1.0)
    others = [place for place in range(1, len(times)) if has_one[place]]
    for place, ratio in zip(others, ratios(times[0], [times[o] for o in others]), strict=True):
        speedups[place] = ratio
    return speedups


def _times(group: RunGroup, target: float | None) -> list[float]:
    # If one run has no time, a mean of the others would look too good.
    if target is not None:
        reached = [time_to(run, target) for run in group.runs]
        # 0 if the target was reached before any step
        times = [time_s for time_s in reached if time_s]
        return times if len(times) == len(reached) else []
    rates = [run.result["images_per_s"] for run in group.runs]
    if not all(rates) or any(map(_goes_on, group.runs)):
        return []
    times = [trained_samples(run) / rate for run, rate in zip(group.runs, rates, strict=True)]
    return times if min(times) > 0 else []


def _goes_on(run: TableRun) -> bool:
    # A restart of the same run names its own folder.
    begun = run.result.get("resumed_from") or ""
    return bool(begun) and Path(begun).name != run.folder.name


def _unequal(baseline: RunGroup, group: RunGroup, target: float | None) -> list[str]:
    # With a target, the samples that a group needs are a result, and may differ.
    unequal = other_work(baseline.first, group.first)
    return [part for part in unequal if target is None or part != "samples seen"]


def _hardware(run: TableRun) -> str:
    gpus = run.words.get("environment.gpus") or []
    workers = run.result["world_size"]
    kind = gpus[0] if gpus else f"{run.words.get('environment.cpu')} core"
    return f"{workers} x {kind}"


def _epochs(run: TableRun) -> float | None:
    parts = str(run.result["data"]).split()
    numbers = [int(word) for word in parts if word.isdigit()]
    return samples_seen(run) / numbers[0] if numbers else None
