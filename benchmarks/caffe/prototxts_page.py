"""The page of what `caffe_prototxts` has found."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kit import raw_lines

Row = dict[str, Any]
GROUPS = {
    "python": "with layers in Python",
    "types": "with types of layers that are a fork's",
    "fields": "with words that are a fork's",
    "refused": "that a real Caffe refuses, in a phase that has data",
    "own": "the others: Caffe's own",
}
"""A net is in the first that it fits."""
MAX_NAMED = {"python": 2, "types": 2}
"""Files named for a reason, in groups in which there are many; else all."""


def page(folder: Path, out: Path) -> str:
    rows = raw_lines.read(out, "file")
    nets = [row for row in rows if row["what"] == "net"]
    solvers = [row for row in rows if row["what"] == "solver"]
    parts = [
        _summary(rows, nets, solvers),
        _groups(nets),
        _compared(nets),
        _solvers(solvers, nets),
        "### Nets that were not imported whole",
        *(_why(group, nets) for group in ("own", "refused", "fields", "types", "python")),
        "### Repositories",
        _repositories(folder, rows),
        "### Files that are no prototxts of nets or solvers",
        _others(rows),
    ]
    return "\n\n".join(parts)


def group_of(row: Row) -> str:
    if row["python"]:
        return "python"
    if row["types_of_forks"]:
        return "types"
    if row["fields_of_forks"]:
        return "fields"
    # Of types that it has not, a real Caffe can say nothing.
    is_refused = not row["taken_on"] and row["refused"].keys() & (row["phases"] or row["refused"])
    return "refused" if is_refused else "own"


def is_whole(row: Row) -> bool:
    return "left_out" in row and not row["left_out"]


def reasons(row: Row) -> list[str]:
    """Why it was not imported whole, without names and numbers."""
    found = row.get("left_out") or [row.get("error") or row.get("broke") or ""]
    return list(dict.fromkeys(map(_general, found)))


def _general(reason: str) -> str:
    reason = re.sub(r"^.*?\.(prototxt|pt)(:\d+)?: ", "", reason)
    reason = re.sub(r"^[^ :]+: (?=\S+ is not understood)", "", reason)
    reason = re.sub(r"at lines? [\d, …]+\d…?", "", reason)
    reason = re.sub(r"'[^']*'", "…", reason)
    return re.sub(r"\b\d+( x \d+)*\b", "N", reason)[:160].replace("|", "/")


def _summary(rows: Sequence[Row], nets: Sequence[Row], solvers: Sequence[Row]) -> str:
    own = [row for row in nets if group_of(row) == "own"]
    whole = sum(map(is_whole, own))
    other = Counter(row["what"] for row in rows) - Counter(net=len(nets), solver=len(solvers))
    told = ", ".join(f"{count} {what}" for what, count in other.most_common()) or "no others"
    repositories = len({_repository(row) for row in [*nets, *solvers]})
    return (
        f"{len(rows):,} different files of {repositories} repositories: {len(nets)} nets, "
        f"{len(solvers)} solvers; {told}. Of {len(own)} nets without Python layers, and "
        f"without what only a fork has, {whole} are imported with nothing left out: "
        f"**{100 * whole / max(1, len(own)):.1f} %**."
    )


def _groups(nets: Sequence[Row]) -> str:
    lines = ["| nets | all | imported whole |", "|---|---|---|"]
    found = Counter(map(group_of, nets))
    whole = Counter(group_of(row) for row in nets if is_whole(row))
    for group, words in GROUPS.items():
        lines.append(f"| {words} | {found[group]} | {whole[group]} |")
    lines.append(f"| all | {len(nets)} | {whole.total()} |")
    given = sum(bool(row.get("shape_given")) for row in nets if is_whole(row))
    unseen = sum(bool(row.get("unseen")) for row in nets if is_whole(row))
    told = []
    for groups in (["own", "refused"], ["own", "refused", "fields"]):
        own = [row for row in nets if group_of(row) in groups]
        count = sum(map(is_whole, own))
        told.append(f"{count} of {len(own)} ({100 * count / max(1, len(own)):.1f} %)")
    note = (
        f"With those that a real Caffe refuses it is {told[0]}, and with words of forks, too, "
        f"{told[1]}. Of those imported whole {given} were told the shape of a sample, for their "
        f"data are not there; in {unseen} there are layers that could not be looked at without the "
        "data."
    )
    return "\n".join(lines) + "\n\n" + note


def _compared(nets: Sequence[Row]) -> str:
    found = [(row, phase, told) for row in nets for phase, told in row["equal"].items()]
    equal = sum(not told for _, _, told in found)
    which = len({row["path"] for row, _, _ in found})
    text = (
        f"A real Caffe loads {which} of the nets, {len(found)} with each phase counted; in {equal} "
        "of these the shape of every blob and of every parameter, and the count of parameters, are "
        f"the same ({100 * equal / max(1, len(found)):.1f} %)."
    )
    others = [f"- `{row['path']}`, {phase}: {told[0]}" for row, phase, told in found if told]
    return "\n".join([text, "", *others]) if others else text


def _solvers(solvers: Sequence[Row], nets: Sequence[Row]) -> str:
    forks = [row for row in solvers if row["fields_of_forks"]]
    own = [row for row in solvers if not row["fields_of_forks"]]
    understood = sum(not row["words"] for row in own)
    groups = {row["sha"]: group_of(row) for row in nets if "sha" in row}
    by_group: dict[str, list[Row]] = defaultdict(list)
    for row in own:
        by_group[groups.get(row["net"], "") if row["net"] else ""].append(row)
    lines = [
        f"Solvers: {len(solvers)}; {len(forks)} of them have words of a fork. Of the others, "
        f"{len(own)}, {understood} are understood word for word "
        f"({100 * understood / max(1, len(own)):.1f} %). By their net to train:",
        "",
        "| solvers of nets | all | imported whole, with the net |",
        "|---|---|---|",
    ]
    for group, words in {**GROUPS, "": "that do not lie beside them, or stand in them"}.items():
        found = _with_whole(by_group[group])
        lines.append(f"| {words} | {found[0]} | {found[1]} |")
    lines += [
        "",
        "Of the solvers of Caffe's own nets that are not imported whole, by reason:",
        "",
        *_counted(by_group["own"], lambda row: not is_whole(row), reasons),
        "",
        "Words that are not understood, or refused:",
        "",
        *_counted(own, lambda row: bool(row["words"]), lambda row: map(_general, row["words"])),
    ]
    return "\n".join(lines)


def _why(group: str, nets: Sequence[Row]) -> str:
    own = [row for row in nets if group_of(row) == group and not is_whole(row)]
    if not own:
        return f"Nets {GROUPS[group]}: none."
    of_group: dict[str, Callable[[Row], Iterable[str]]] = {
        "python": lambda row: row["python"],
        "types": lambda row: row["types_of_forks"],
        "fields": lambda row: row["fields_of_forks"],
        "refused": lambda row: {_refusal(each) for each in row["refused"].values()},
        "own": reasons,
    }
    lines = _counted(own, lambda row: True, of_group[group], MAX_NAMED.get(group))
    return "\n".join([f"Nets {GROUPS[group]}, {len(own)}; nets by reason:", "", *lines])


def _refusal(error: str) -> str:
    """Caffe's line without time and place."""
    return _general(re.sub(r"^F\d+ \S+ +\d+ \S+\] ", "", error))


def _counted(
    rows: Iterable[Row],
    counts: Callable[[Row], bool],
    of: Callable[[Row], Iterable[str]],
    most_named: int | None = None,
) -> list[str]:
    """A line for each reason, with the files, or the first ones of them."""
    found: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if counts(row):
            for reason in dict.fromkeys(of(row)):
                found[reason].append(row["path"])
    lines = []
    for reason, paths in sorted(found.items(), key=lambda each: (-len(each[1]), each[0])):
        named = ", ".join(f"`{each}`" for each in paths[:most_named])
        left = len(paths) - len(paths[:most_named])
        more = f" and {left} more" if left else ""
        lines.append(f"- {len(paths)}: {reason}: {named}{more}")
    return lines or ["- none"]


def _repositories(folder: Path, rows: Sequence[Row]) -> str:
    commits = dict(
        line.split("\t")[:2] for line in (folder / "sources.tsv").read_text().splitlines()
    )
    lines = [
        "| repository | commit | nets | whole | Caffe's own | whole | solvers | understood |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in sorted({_repository(row) for row in rows}):
        nets = [row for row in rows if _repository(row) == name and row["what"] == "net"]
        own = [row for row in nets if group_of(row) == "own"]
        solvers = [row for row in rows if _repository(row) == name and row["what"] == "solver"]
        understood = sum(not row["words"] for row in solvers)
        if nets or solvers:
            counts = [*_with_whole(nets), *_with_whole(own), len(solvers), understood]
            lines.append(
                f"| {name} | {commits.get(name, '')[:12]} | {' | '.join(map(str, counts))} |"
            )
    return "\n".join(lines)


def _with_whole(rows: Sequence[Row]) -> tuple[int, int]:
    return len(rows), sum(map(is_whole, rows))


def _repository(row: Row) -> str:
    return str(row["path"]).partition("/")[0].replace("+", "/", 1)


def _others(rows: Sequence[Row]) -> str:
    lines = []
    for what in ("template", "broken", "other"):
        own = [row for row in rows if row["what"] == what]
        named = [f"`{row['path']}`" + (f": {row['wrong']}" if row["wrong"] else "") for row in own]
        if what == "other":
            by = Counter(map(_repository, own))
            named = [f"{count} of {name}" for name, count in by.most_common()]
        lines.append(f"- {what}, {len(own)}: {'; '.join(named) or 'none'}")
    return "\n".join(lines)
