"""Draws a schedule for a terminal: ranks are columns, rounds go down the page.

A double line adds at its head, a single line overwrites; two heads are two transfers, one each way.
Equal rounds are drawn once, and so is a pair of rounds that alternate. Every character is in code
page 437, and so in every font that terminals use.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from firecaffe.exchange.schedule import Round, Schedule, Transfer

LEGEND = "═══► adds    ───► overwrites    n: the whole vector"
SPACINGS = (4, 3)


@dataclass(frozen=True, slots=True)
class _Arrow:  # one transfer, or two that cross
    left: int
    right: int
    head_left: bool
    head_right: bool
    reduce: bool


def draw(schedule: Schedule, width: int = 100) -> str:
    """Return the picture in lines of at most `width`, or one line that says it does not fit."""
    if not schedule.rounds:
        return f"{schedule.algorithm}, {_count(schedule.world_size, 'rank')}: nothing is sent"
    for spacing in SPACINGS:
        if (schedule.world_size - 1) * spacing < width:  # else do not even try: P may be large
            lines = _picture(schedule, spacing)
            if max(map(len, lines)) <= width:
                return "\n".join(lines)
    ranks = _count(schedule.world_size, "rank")
    return f"{schedule.algorithm}, {ranks}: the picture does not fit into {width} columns"


def _picture(schedule: Schedule, spacing: int) -> list[str]:
    ranks = range(schedule.world_size)
    looks = [
        (
            _arrows(round_),
            _amount(round_, schedule.num_elements)
            + (", in memory" if all(map(schedule.in_memory, round_)) else ""),
        )
        for round_ in schedule.rounds
    ]
    groups = [
        (name, looks[index][1], _rows(looks[index][0], schedule.world_size, spacing))
        for name, index in _named_once(looks)
    ]
    margin = max(len(name) for name, _, _ in groups) + 2
    lines = [
        LEGEND,
        "",
        "rank".ljust(margin) + "".join(str(rank).ljust(spacing) for rank in ranks).rstrip(),
    ]
    for name, amount, rows in groups:
        lines.append(" " * margin + _row([], schedule.world_size, spacing))
        lines.append(f"{name:{margin}}{rows[0]}  {amount}")
        lines += [" " * margin + row for row in rows[1:]]
    return lines


def _named_once(looks: Sequence[object]) -> list[tuple[str, int]]:
    # Pairs: the name of all rounds that one drawn round stands for, and its index.
    named = []
    start = 0
    while start < len(looks):
        for period in (1, 2):
            stop = start + period
            while looks[stop : stop + period] == looks[start : start + period]:
                stop += period
            if stop > start + period:
                break
        else:
            period, stop = 1, start + 1
        named += [(_name(range(i + 1, stop + 1, period)), i) for i in range(start, start + period)]
        start = stop
    return named


def _name(numbers: range) -> str:
    first, last = numbers[0], numbers[-1]
    if first == last:
        return f"round {first}"
    if numbers.step == 1:
        return f"rounds {first}-{last}"
    shown = numbers if len(numbers) < 4 else (first, numbers[1], "...", last)
    return f"rounds {', '.join(map(str, shown))}"


def _arrows(round_: Round) -> tuple[_Arrow, ...]:
    # Equal pictures give equal tuples. Inputs that go the same way are one arrow.
    drawn = dict.fromkeys(t._replace(reads=min(t.reads, 0)) for t in round_)
    ways: Counter[tuple[int, int, bool, bool]] = Counter(_way(t) for t in drawn)
    arrows = []
    for left, right, reduce in sorted({(left, right, reduce) for left, right, _, reduce in ways}):
        to_left = ways[left, right, False, reduce]
        to_right = ways[left, right, True, reduce]
        arrows += [
            _Arrow(left, right, head_left=i < to_left, head_right=i < to_right, reduce=reduce)
            for i in range(max(to_left, to_right))
        ]
    return tuple(sorted(arrows, key=lambda arrow: arrow.right - arrow.left))


def _way(t: Transfer) -> tuple[int, int, bool, bool]:
    to_right = t.source < t.destination
    return min(t.source, t.destination), max(t.source, t.destination), to_right, t.reduce


def _packed(arrows: tuple[_Arrow, ...]) -> list[list[_Arrow]]:
    # Each arrow is on the first line on which it meets no other.
    lines: list[list[_Arrow]] = []
    for arrow in arrows:
        for line in lines:
            if all(arrow.right < other.left or other.right < arrow.left for other in line):
                line.append(arrow)
                break
        else:
            lines.append([arrow])
    return lines


def _rows(arrows: tuple[_Arrow, ...], world_size: int, spacing: int) -> list[str]:
    each_with_each = {
        _Arrow(left, right, head_left=True, head_right=True, reduce=arrows[0].reduce)
        for right in range(world_size)
        for left in range(right)
    }
    # Up to four ranks the arrows themselves are easier to read.
    if world_size > 4 and len(arrows) == len(each_with_each) and set(arrows) == each_with_each:
        line = "═" if arrows[0].reduce else "─"
        return [f"◄{' all pairs '.center((world_size - 1) * spacing - 1, line)}►"]
    return [_row(line, world_size, spacing) for line in _packed(arrows)]


def _row(arrows: list[_Arrow], world_size: int, spacing: int) -> str:
    signs = list(("│" + " " * (spacing - 1)) * (world_size - 1) + "│")
    for arrow in arrows:
        start, stop = arrow.left * spacing, arrow.right * spacing
        for column in range(start, stop + 1):
            crosses = column % spacing == 0
            signs[column] = ("╪" if crosses else "═") if arrow.reduce else "┼" if crosses else "─"
        signs[start] = "◄" if arrow.head_left else "╞" if arrow.reduce else "├"
        signs[stop] = "►" if arrow.head_right else "╡" if arrow.reduce else "┤"
    return "".join(signs)


def _amount(round_: Round, num_elements: int) -> str:
    most = max(t.num_elements for t in round_)
    least = min(t.num_elements for t in round_)
    if least < most:
        return f"{least} to {_count(most, 'element')}"
    if num_elements % most:
        return _count(most, "element")
    return "n" if most == num_elements else f"n/{num_elements // most}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
