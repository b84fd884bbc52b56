"""Measures a cluster: each rank's device, files and network, and the link between every two hosts.

Hosts are paired as in a round-robin tournament, so n hosts need n - 1 turns and no two measurements
share a port.
"""

import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import psutil
import torch

from firecaffe.cluster.agree import gather_as, gather_text
from firecaffe.cluster.world import World, peers_may_be_lost
from firecaffe.data import Batches, SampleOrder
from firecaffe.inventory.findings import Inventory
from firecaffe.measure.step_times import dataset_of
from firecaffe.recipe.checked_recipe import CheckedRecipe
from firecaffe.training.first_look import FirstLook
from firecaffe.training.forward import Forward, arithmetic
from firecaffe.training.given_parts import Parts, build_network, task_for
from firecaffe.transport.link import LinkEnd, MeasuredLink, finish

MIN_STREAM_S = 0.1
PINGS = 10
BURSTS = 5
PAUSE_S = 0.1
"""Seconds between bursts of pings, so that passing other work cannot disturb all of them."""
FILE_BYTES = 64_000_000
MATRIX_SIZE = 1024
COPIED_BYTES = 64_000_000
REPETITIONS = 7


@dataclass(frozen=True)
class RankFacts:
    rank: int
    host: str
    group: str
    """The launcher's name for the rank's host (GROUP_RANK)."""
    versions: str
    device: str
    memory_bytes: int
    free_memory_bytes: int
    free_disk_bytes: int
    clock_s: float
    """This rank's clock minus the first rank's at one moment."""
    clock_error_s: float
    matrix_flops: tuple[float, ...]
    """FLOP/s of each repetition of a float32 matrix product, with all ranks computing at once."""
    copy_bytes_per_s: tuple[float, ...]
    """Bytes read and written per second, for each repetition."""
    file_write_bytes_per_s: float
    file_read_bytes_per_s: float
    name_lookup_s: float
    """Seconds of the lookup of rank 0's address and its name, found or not."""


@dataclass(frozen=True)
class PairLink(MeasuredLink):
    in_host: bool


def look_over(
    world: World, folder: Path, device_name: str, say: Callable[[str], None]
) -> list[RankFacts]:
    """Measure every rank; all ranks receive all results. folder: where test files are written.

    Raises: OSError, only on a rank that cannot write a file there; PeerLostError.
    """
    say("clocks")
    clock_s, clock_error_s = _clock(world)
    say("computing")
    flops = _matrix_flops(world.device)
    copies = _copy_rates(world.device)
    say("files")
    written, read = _file_rates(folder, world.rank)
    memory = psutil.virtual_memory()
    has_gpu = world.device.type == "cuda"
    total, free = memory.total, memory.available
    if has_gpu:
        free, total = torch.cuda.mem_get_info(world.device)
    say("name lookups")
    lookup_s = _name_lookup_s()
    facts = RankFacts(
        world.rank,
        world.host,
        os.environ.get("GROUP_RANK", ""),
        f"python {platform.python_version()}, torch {torch.__version__}, {sys.platform}",
        device_name,
        total,
        free,
        psutil.disk_usage(str(folder)).free,
        clock_s,
        clock_error_s,
        tuple(flops),
        tuple(copies),
        written,
        read,
        lookup_s,
    )
    return gather_as(world, facts, RankFacts)


def _name_lookup_s() -> float:
    # torch's store looks up each host that it connects to, and then the name of its address.
    host, mapped = os.environ.get("MASTER_ADDR", "127.0.0.1"), socket.AI_V4MAPPED
    begun = time.perf_counter()
    with suppress(OSError):
        addresses = socket.getaddrinfo(host, 0, socket.AF_INET6, flags=mapped)
        socket.getnameinfo(addresses[0][4], 0)
    return time.perf_counter() - begun


def links_of(world: World, places: Sequence[object], say: Callable[[str], None]) -> list[PairLink]:
    """Measure links between hosts, by one rank of each, and one inside a host; all get all results.

    places: the place (host) of each rank.
    """
    firsts = [rank for rank, place in enumerate(places) if place not in places[:rank]]
    turns = tournament(firsts)
    second = next((rank for rank in range(len(places)) if rank not in firsts), None)
    if second is not None:
        turns.append([(places.index(places[second]), second)])
    measured: list[PairLink] = []
    for number, pairs in enumerate(turns):
        say(f"links, turn {number + 1} of {len(turns)}")
        for first, other in pairs:
            if world.rank in (first, other):
                link = _measure(world, first, other, places[first] == places[other])
                measured += [link] if world.rank == first else []
        gather_text(world, "")  # all end this turn before the next begins
    return [*chain(*gather_as(world, measured, list[PairLink]))]


def tournament(players: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Plan turns in which every two meet once and nobody is in two pairs (circle method)."""
    circle: list[int | None] = [*players, *([None] if len(players) % 2 else [])]
    turns = []
    for _ in range(len(circle) - 1):
        pairs = zip(circle, reversed(circle), strict=True)
        meet = [(a, b) for a, b in list(pairs)[: len(circle) // 2]]
        turns.append([(min(a, b), max(a, b)) for a, b in meet if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return turns if len(players) > 1 else []


def _measure(world: World, first: int, second: int, in_host: bool) -> PairLink:
    end = LinkEnd.of(world, first, second)
    with peers_may_be_lost(world):
        latencies = []
        for _ in range(BURSTS):
            time.sleep(PAUSE_S)
            latencies += end.latency_samples_s(PINGS)
        rates = end.bandwidth_samples_bytes_per_s(MIN_STREAM_S)
    return PairLink(first, second, tuple(latencies), tuple(rates), in_host)


def _clock(world: World) -> tuple[float, float]:
    """Measure this clock minus the first rank's, and its error: half the time of the gathering."""
    best = float("inf"), 0.0
    for _ in range(5):
        gather_text(world, "")
        before = time.time()
        stated = gather_text(world, repr(before))
        after = time.time()
        best = min(best, (after - before, before - float(stated[0])))
    return best[1], best[0] / 2


def _matrix_flops(device: torch.device) -> list[float]:
    a = torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=device)
    torch.mm(a, a)
    return _rates(device, 2 * MATRIX_SIZE**3, lambda: torch.mm(a, a))


def _copy_rates(device: torch.device) -> list[float]:
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _rates(device, 2 * COPIED_BYTES, lambda: target.copy_(source))


def _rates(device: torch.device, count: int, work: Callable[[], object]) -> list[float]:
    rates = []
    for _ in range(REPETITIONS):
        finish(device)
        start_s = time.perf_counter()
        work()
        finish(device)
        rates.append(count / (time.perf_counter() - start_s))
    return rates


def _file_rates(folder: Path, rank: int) -> tuple[float, float]:
    """Measure bytes/s to write and sync a file, and to read it without the page cache."""
    path = folder / f".firecaffe-check-{socket.gethostname()}-{os.getpid()}-{rank}"
    data = os.urandom(1 << 20) * (FILE_BYTES >> 20)
    try:
        start_s = time.perf_counter()
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        written = len(data) / (time.perf_counter() - start_s)
        with open(path, "rb") as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            start_s = time.perf_counter()
            while file.read(1 << 22):
                pass
            read = len(data) / (time.perf_counter() - start_s)
    finally:
        path.unlink(missing_ok=True)
    return written, read


def inventory_of(recipe: CheckedRecipe, device: torch.device) -> Inventory:
    """Inspect the whole network (whatever [parallel] says) and the loss, as before a first step.

    Raises: RecipeError if training cannot keep its state the same on any number of workers.
    """
    train = recipe.train
    with arithmetic(train, device):
        data = dataset_of(recipe, 2 * train.micro_batch_size)
        network = build_network(recipe, Parts(), data, device)
        size = train.micro_batch_size
        order = SampleOrder(train.seed, len(data), 2 * size, size)
        task = task_for(recipe, None, None, data)
        forward = Forward(network, task, train, device=device)
        return FirstLook(forward).around(Batches(data, order, recipe.data, device))
