"""`firecaffe.schedule`: the rounds and transfers of an exchange."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rich.console import Console
from rich.table import Table

from firecaffe.api.answer import Answer
from firecaffe.api.argument_checks import check_count
from firecaffe.cluster.from_script import from_script
from firecaffe.errors import RecipeError
from firecaffe.exchange import fold, parse_hierarchical
from firecaffe.exchange.collectives import find_collective
from firecaffe.exchange.draw import draw as draw_rounds
from firecaffe.exchange.leaves import equal_shares
from firecaffe.exchange.route import FOLD, find_route
from firecaffe.exchange.schedule import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    AVERAGE,
    BROADCAST,
    BYTES_PER_ELEMENT,
    VECTOR,
    Schedule,
    Transfer,
    lower_bound_elements,
)
from firecaffe.resume_advice import option, positional
from firecaffe.user_code import shown
from firecaffe.value_checks import count_of

ELEMENTS_PER_RANK = 1024
"""Elements per rank with which all shards, though not all segments, are equal at every size."""

MICRO_BATCHES = 16
MAX_WORLD_SIZE = 1024
MAX_ROWS = 64


@dataclass(frozen=True, repr=False)
class ExchangeRounds(Answer):
    """The transfers of an exchange, round by round, and its figures."""

    exchange: Schedule
    """The exchange as a value."""
    ranks_per_node: int
    """The ranks of a node."""
    is_drawn: bool
    """Whether the rounds are drawn."""

    @property
    def figures(self) -> dict[str, Any]:
        """The figures of the exchange. Bytes are of float32 elements."""
        return facts(self.exchange, self.ranks_per_node)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures, and all transfers."""
        transfers = [
            {"round": number, **_facts_of(transfer, self.exchange)}
            for number, transfer in _numbered(self.exchange)
        ]
        return {**self.figures, "transfers": transfers}

    def print_to(self, console: Console) -> None:
        if self.is_drawn:
            console.print(draw_rounds(self.exchange, console.width), soft_wrap=True)
        super().print_to(console)

    def _parts(self) -> Iterator[Table | str]:
        if not self.is_drawn:
            yield from _transfers(self.exchange)
        yield ""
        yield from _totals(self.figures)


@from_script
def schedule(
    exchange: str,
    workers: int,
    *,
    ranks_per_node: int = 1,
    shared_memory: bool = False,
    elements: int | None = None,
    kind: str = ALL_REDUCE,
    micro_batches: int | None = None,
    draw: bool = False,
) -> ExchangeRounds:
    """Return the rounds and transfers of an exchange.

    Args:
        exchange: Its name, as "ring" or "hierarchical(tree,ring)".
        workers: The number of ranks.
        ranks_per_node: Ranks of a node, for hierarchical(INNER,OUTER) and shared_memory.
        shared_memory: Whether ranks of a node add in shared memory, as in training on CPUs.
        elements: The length of the float32 vector; 1,024 for each rank without it.
        kind: Another collective than an all-reduce.
        micro_batches: Micro-batches of a step, for fold; 16 without it.
        draw: Draw the rounds instead of a table.

    Raises: RecipeError.
    """
    if type(workers) is not int or not 1 <= workers <= MAX_WORLD_SIZE:
        raise RecipeError(
            f"{positional('workers')} is {shown(workers)}; it must be 1 to {MAX_WORLD_SIZE}"
        )
    if not isinstance(exchange, str):
        raise RecipeError(f"{positional('exchange')} is {shown(exchange)}; expected a name")
    check_count("ranks_per_node", ranks_per_node, 1)
    if micro_batches is not None:
        check_count("micro_batches", micro_batches, 1)
    has_nodes = shared_memory or parse_hierarchical(exchange) is not None
    if ranks_per_node != 1 and not has_nodes:
        raise RecipeError(
            f"{option('ranks_per_node')} is {ranks_per_node}, and {exchange} does not tell nodes "
            f"apart; it goes with hierarchical(INNER,OUTER) and {option('shared_memory')}"
        )
    if micro_batches is not None and exchange != FOLD:
        raise RecipeError(
            f"{option('micro_batches')} goes with {FOLD}; {exchange} has one sum a rank"
        )
    if shared_memory and (exchange == FOLD or kind != ALL_REDUCE):
        raise RecipeError(
            f"{option('shared_memory')} goes with an exchange's {ALL_REDUCE}; {exchange}, "
            f"{kind} goes by messages"
        )
    num_elements = ELEMENTS_PER_RANK * workers if elements is None else elements
    check_count("elements", num_elements, 0)
    if exchange == FOLD and kind == ALL_REDUCE:
        leaves = MICRO_BATCHES if micro_batches is None else micro_batches
        made = _fold(leaves, workers, num_elements)
    elif shared_memory:
        made = _in_memory(exchange, workers, ranks_per_node, num_elements)
    else:
        try:
            made = find_collective(kind, exchange, ranks_per_node)(workers, num_elements)
        except ValueError as error:
            raise RecipeError(str(error)) from error
    return ExchangeRounds(made, ranks_per_node, draw)


def _fold(leaves: int, workers: int, num_elements: int) -> Schedule:
    if leaves < workers:
        raise RecipeError(
            f"{option('micro_batches')} is {leaves}; {workers} workers need at least {workers}"
        )
    inputs = fold.inputs_of(leaves, equal_shares(leaves, workers))
    return fold.schedule(inputs, leaves, num_elements, early=True)


def _in_memory(exchange: str, workers: int, per_node: int, num_elements: int) -> Schedule:
    try:
        route = find_route(exchange, None, workers, per_node, shared_memory=True)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    if not route.shares_memory:
        raise RecipeError(
            f"{option('shared_memory')}: {exchange} does not add in memory with {workers} "
            f"workers and {option('ranks_per_node')} {per_node}; it takes 2 or more ranks a node, "
            "which the workers fill, and the tree's order of additions within nodes and between "
            "them"
        )
    return route.schedule(num_elements)


def facts(schedule: Schedule, ranks_per_node: int) -> dict[str, Any]:
    busiest = schedule.elements_of_busiest_rank()
    least = 0.0
    if schedule.kind in (ALL_REDUCE, AVERAGE):
        senders = schedule.world_size // schedule.ranks_per_memory
        least = lower_bound_elements(senders, schedule.num_elements)
    return {
        "algorithm": schedule.algorithm,
        "kind": schedule.kind,
        "world_size": schedule.world_size,
        "ranks_per_node": ranks_per_node,
        "num_elements": schedule.num_elements,
        "num_rounds": len(schedule.rounds),
        "num_transfers": sum(map(len, schedule.rounds)),
        "busiest_rank_bytes": busiest * BYTES_PER_ELEMENT,
        "lower_bound_bytes": least * BYTES_PER_ELEMENT,
        "ratio_to_lower_bound": busiest / least if least else None,
        "serial_messages": schedule.serial_messages(),
        "serial_bytes": schedule.serial_elements() * BYTES_PER_ELEMENT,
        "serial_additions": schedule.serial_additions(),
        "adds_in_tree_order": schedule.in_tree_order,
    }


def _numbered(schedule: Schedule) -> list[tuple[int, Transfer]]:
    return [(number, t) for number, round_ in enumerate(schedule.rounds, 1) for t in round_]


def _facts_of(t: Transfer, schedule: Schedule) -> dict[str, Any]:
    return {
        "source": t.source,
        "destination": t.destination,
        "start": t.start,
        "stop": t.stop,
        "action": "add" if t.reduce else "overwrite",
        **({} if t.reads == VECTOR else {"input": t.reads}),
        **({"in_memory": True} if schedule.in_memory(t) else {}),
    }


def _transfers(schedule: Schedule) -> Iterator[Table | str]:
    transfers = _numbered(schedule)
    table = Table("round", "source → destination", "elements", "action")
    before = 1
    for number, t in islice(transfers, MAX_ROWS):
        if number != before:
            table.add_section()
        before = number
        what = ("add" if t.reduce else "overwrite") + " in memory" * schedule.in_memory(t)
        table.add_row(str(number), f"{t.source} → {t.destination}", f"{t.start}:{t.stop}", what)
    if transfers:
        yield table
    left_out = len(transfers) - MAX_ROWS
    if left_out > 0:
        yield f"… and {left_out} more transfers; {option('json')} has all of them"


def _totals(figures: dict[str, Any]) -> Iterator[str]:
    ratio = figures["ratio_to_lower_bound"]
    times = "" if ratio is None else f", {ratio:.2f} times the least that any all-reduce needs"
    order = "the order of the fixed tree" if figures["adds_in_tree_order"] else "another order"
    adds = f"in {order} at this world size"
    if figures["kind"] in (ALL_GATHER, BROADCAST, ALL_TO_ALL):
        adds = "none"
    kind = "" if figures["kind"] == ALL_REDUCE else f"{figures['kind']} of "
    ranks = count_of(figures["world_size"], "rank", "ranks")
    rows = {
        "exchange": f"{kind}{figures['algorithm']}, {ranks}, "
        f"{figures['num_elements']} float32 elements",
        "rounds": f"{figures['num_rounds']}, of {figures['num_transfers']} transfers in all",
        "busiest rank": f"{figures['busiest_rank_bytes']} bytes one way{times}",
        "in lock step": f"{figures['serial_messages']} messages, {figures['serial_bytes']} bytes, "
        f"{figures['serial_additions']} additions, one after the other",
        "additions": adds,
    }
    yield from (f"{name:14}{value}" for name, value in rows.items())
