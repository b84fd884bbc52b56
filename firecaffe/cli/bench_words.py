"""The options of `firecaffe bench exchange`, checked before a rank starts."""

import re
from dataclasses import dataclass

from jsonargparse import Namespace

from firecaffe.errors import RecipeError
from firecaffe.exchange import EXCHANGES, NATIVE, find_schedule, parse_hierarchical
from firecaffe.exchange.choose import BYTES_PER_ELEMENT
from firecaffe.gradients.compressors import COMPRESSORS

DEVICES = ("auto", "cpu", "cuda")
MOST_REPETITIONS = 1_000_000
"""Most repetitions of a measurement: each time is stored."""


@dataclass(frozen=True)
class BenchPlan:
    """The measurements to make, equal on all ranks."""

    exchanges: tuple[str, ...]
    compressors: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    repetitions: int
    device: str
    link_bits_per_s: float | None
    shared_memory: bool


def make_plan(options: Namespace) -> BenchPlan:
    """Parse the options. Raises RecipeError that names the wrong one."""
    if not 1 <= options.iters <= MOST_REPETITIONS:
        raise RecipeError(f"-n is {options.iters}; it must be 1 to {MOST_REPETITIONS:,}")
    if options.device not in DEVICES:
        raise RecipeError(f"--device is {options.device!r}; it must be {', '.join(DEVICES)}")
    least, most = parse_size("-b", options.minbytes), parse_size("-e", options.maxbytes)
    return BenchPlan(
        parse_exchanges(options.exchanges),
        () if options.compressors is None else parse_compressors(options.compressors),
        sizes(least, most, options.stepfactor),
        options.iters,
        options.device,
        None if options.link is None else parse_link(options.link),
        options.shared_memory,
    )


def parse_exchanges(text: str) -> tuple[str, ...]:
    """Parse `all` or `a,b,…`, each once; the control `native` is first. Raises RecipeError."""
    # Do not split at the comma of hierarchical(INNER,OUTER).
    names = list(EXCHANGES) if text == "all" else re.split(r",(?![^()]*\))", text)
    for name in names:
        if name in EXCHANGES:
            continue
        if parse_hierarchical(name) is None:
            raise RecipeError(
                f"--exchanges: no exchange {name!r}; it must be all, or some of "
                f"{', '.join(EXCHANGES)}, hierarchical(INNER,OUTER) with commas between"
            )
        try:
            find_schedule(name)
        except ValueError as error:
            raise RecipeError(f"--exchanges: {error}") from None
    return tuple(dict.fromkeys([NATIVE, *names]))


def parse_compressors(text: str) -> tuple[str, ...]:
    names = text.split(",")
    for name in names:
        if name not in COMPRESSORS:
            raise RecipeError(
                f"--compressors: no compressor {name!r}; it must be some of "
                f"{', '.join(COMPRESSORS)} with commas between"
            )
    return tuple(dict.fromkeys(names))


def parse_size(word: str, text: str) -> int:
    """Parse a size in bytes; K, M and G are of 1024, as in nccl-tests. Raises RecipeError."""
    match = re.fullmatch(r"([0-9]+)([KMG]?)", text)
    size = int(match[1]) * 1024 ** " KMG".index(match[2] or " ") if match else 0
    if size < BYTES_PER_ELEMENT or size % BYTES_PER_ELEMENT:
        raise RecipeError(
            f"{word} is {text!r}; it must be bytes, a multiple of {BYTES_PER_ELEMENT} "
            "(float32), as 8, 64K, 128M or 1G (K is 1024)"
        )
    return size


def parse_link(text: str) -> float:
    """Parse bits per second; k, M and G are of 1000. Raises RecipeError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kMG]?)", text)
    rate = float(match[1]) * 1000 ** " kMG".index(match[2] or " ") if match else 0.0
    if rate <= 0:
        raise RecipeError(
            f"--link is {text!r}; it must be bits per second, as 200M or 2.5G (k is 1000)"
        )
    return rate


def sizes(least_bytes: int, most_bytes: int, factor: int) -> tuple[int, ...]:
    """Return sizes from the least to at most the most, growing by `factor`. Raises RecipeError."""
    if most_bytes < least_bytes:
        raise RecipeError(f"-e is {most_bytes}; it must be at least -b, which is {least_bytes}")
    if factor < 2:
        raise RecipeError(f"-f is {factor}; it must be a whole number, 2 or more")
    found = [least_bytes]
    while found[-1] * factor <= most_bytes:
        found.append(found[-1] * factor)
    return tuple(found)
