"""`firecaffe schedule EXCHANGE WORKERS`: the rounds and transfers of an exchange."""

import json
from itertools import islice
from typing import Any

from rich.console import Console
from rich.table import Table

from firecaffe.cli.arguments import Parser
from firecaffe.errors import RecipeError
from firecaffe.exchange import ALGORITHMS, fold, parse_hierarchical
from firecaffe.exchange.choose import BYTES_PER_ELEMENT
from firecaffe.exchange.collectives import find_collective
from firecaffe.exchange.draw import draw
from firecaffe.exchange.leaves import equal_shares
from firecaffe.exchange.route import FOLD, find_route
from firecaffe.exchange.schedule import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    AVERAGE,
    BROADCAST,
    KINDS,
    VECTOR,
    Schedule,
    Transfer,
    lower_bound_elements,
)

ELEMENTS_PER_RANK = 1024
"""Elements per rank with which all shards, though not all segments, are equal at every size."""

MICRO_BATCHES = 16


def make_parser() -> Parser:
    parser = Parser(
        "schedule",
        "EXCHANGE WORKERS [--kind KIND] [--ranks-per-node M] [--shared-memory] [--elements N] "
        "[--draw] [--json]",
        f"Show the rounds and transfers of an exchange: {', '.join(ALGORITHMS)}, "
        f"'hierarchical(INNER,OUTER)', {FOLD}.",
        notes=(
            "It also says how far the bytes of the busiest rank are from the least possible, and "
            "whether the exchange adds in tree order.",
            "Quote 'hierarchical(INNER,OUTER)' for the shell. Each of its nodes has "
            "--ranks-per-node ranks. With --shared-memory only what goes between nodes counts as "
            "sent.",
        ),
    )
    add = parser.add
    add("exchange", type=str, help="name of the exchange")
    add("workers", type=int, help="number of ranks")
    add(
        "--ranks-per-node",
        type=int,
        default=1,
        metavar="M",
        help="ranks of a node, for hierarchical(INNER,OUTER) and --shared-memory",
    )
    add(
        "--shared-memory",
        action="store_true",
        help="ranks of a node add in shared memory, as in training on CPUs",
    )
    add(
        "--elements",
        type=int,
        default=None,
        metavar="N",
        help=f"length of the float32 vector; else {ELEMENTS_PER_RANK} for each rank",
    )
    add("--kind", choices=KINDS, default=ALL_REDUCE, help="another collective than an all-reduce")
    add(
        "--micro-batches",
        type=int,
        default=None,
        metavar="N",
        help=f"micro-batches of a step, for {FOLD}; else {MICRO_BATCHES}",
    )
    add("--draw", action="store_true", help="draw the rounds instead of a table")
    add("--json", action="store_true", help="print one JSON object, complete")
    return parser


MAX_WORLD_SIZE = 1024
MAX_ROWS = 64


def main(argv: list[str]) -> int:
    options = make_parser().parse_args(argv)
    ranks_per_node = options.ranks_per_node
    tells_nodes = options.shared_memory or parse_hierarchical(options.exchange) is not None
    if ranks_per_node != 1 and not tells_nodes:
        raise RecipeError(
            f"--ranks-per-node is {ranks_per_node}, and {options.exchange} does not tell nodes "
            "apart; it goes with hierarchical(INNER,OUTER) and --shared-memory"
        )
    if options.draw and options.json:
        raise RecipeError("--draw is a picture and --json none; leave one out")
    if options.micro_batches is not None and options.exchange != FOLD:
        raise RecipeError(
            f"--micro-batches goes with {FOLD}; {options.exchange} has one sum a rank"
        )
    if options.shared_memory and (options.exchange == FOLD or options.kind != ALL_REDUCE):
        raise RecipeError(
            f"--shared-memory goes with an exchange's {ALL_REDUCE}; {options.exchange}, "
            f"{options.kind} goes by messages"
        )
    schedule = _schedule(options)
    figures = facts(schedule, ranks_per_node)
    if options.json:
        transfers = [
            {"round": number, **_facts_of(transfer, schedule)}
            for number, transfer in _numbered(schedule)
        ]
        print(json.dumps({**figures, "transfers": transfers}))
        return 0
    console = Console(highlight=False, soft_wrap=True)
    if options.draw:
        console.print(draw(schedule, console.width), markup=False)
    else:
        _print_transfers(schedule, console)
    _print_totals(figures, console)
    return 0


def facts(schedule: Schedule, ranks_per_node: int) -> dict[str, Any]:
    """Return the figures of a schedule. Bytes are of float32 elements."""
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


def _schedule(options: Any) -> Schedule:
    world_size, num_elements = options.workers, options.elements
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise RecipeError(f"WORKERS is {world_size}; it must be 1 to {MAX_WORLD_SIZE}")
    if num_elements is None:
        num_elements = ELEMENTS_PER_RANK * world_size
    if num_elements < 0:
        raise RecipeError(f"--elements is {num_elements}; it must be at least 0")
    if options.exchange == FOLD and options.kind == ALL_REDUCE:
        leaves = MICRO_BATCHES if options.micro_batches is None else options.micro_batches
        if leaves < world_size:
            raise RecipeError(
                f"--micro-batches is {leaves}; {world_size} workers need at least {world_size}"
            )
        inputs = fold.inputs_of(leaves, equal_shares(leaves, world_size))
        return fold.schedule(inputs, leaves, num_elements, early=True)
    try:
        if options.shared_memory:
            return _in_memory(options, num_elements)
        find = find_collective(options.kind, options.exchange, options.ranks_per_node)
        return find(world_size, num_elements)
    except ValueError as error:
        raise RecipeError(str(error)) from error


def _in_memory(options: Any, num_elements: int) -> Schedule:
    per_node = options.ranks_per_node
    route = find_route(options.exchange, None, options.workers, per_node, shared_memory=True)
    if not route.shares_memory:
        raise RecipeError(
            f"--shared-memory: {options.exchange} does not add in memory with {options.workers} "
            f"workers and --ranks-per-node {per_node}; it takes 2 or more ranks a node, which the "
            "workers fill, and the tree's order of additions within nodes and between them"
        )
    return route.schedule(num_elements)


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


def _print_transfers(schedule: Schedule, console: Console) -> None:
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
        console.print(table)
    left_out = len(transfers) - MAX_ROWS
    if left_out > 0:
        console.print(f"… and {left_out} more transfers; --json has all of them")


def _print_totals(figures: dict[str, Any], console: Console) -> None:
    ratio = figures["ratio_to_lower_bound"]
    times = "" if ratio is None else f", {ratio:.2f} times the least that any all-reduce needs"
    order = "the order of the fixed tree" if figures["adds_in_tree_order"] else "another order"
    adds = f"in {order} at this world size"
    if figures["kind"] in (ALL_GATHER, BROADCAST, ALL_TO_ALL):
        adds = "none"
    kind = "" if figures["kind"] == ALL_REDUCE else f"{figures['kind']} of "
    ranks = "1 rank" if figures["world_size"] == 1 else f"{figures['world_size']} ranks"
    rows = {
        "exchange": f"{kind}{figures['algorithm']}, {ranks}, "
        f"{figures['num_elements']} float32 elements",
        "rounds": f"{figures['num_rounds']}, of {figures['num_transfers']} transfers in all",
        "busiest rank": f"{figures['busiest_rank_bytes']} bytes one way{times}",
        "in lock step": f"{figures['serial_messages']} messages, {figures['serial_bytes']} bytes, "
        f"{figures['serial_additions']} additions, one after the other",
        "additions": adds,
    }
    console.print()
    for name, value in rows.items():
        console.print(f"{name:14}{value}")
