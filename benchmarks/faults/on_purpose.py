"""Faults on purpose: a plug-in that makes them happen, really, at a step of a rank.

    FIRECAFFE_PLUGINS=benchmarks.faults.on_purpose FAULTS_ON_PURPOSE=KIND:rank=R,step=S …

Several faults are parted by blanks. A fault stands before what fetches a micro-batch, or around
what writes a checkpoint. docs/howto/faults_on_purpose.md lists the kinds.
"""

import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch
from torch import Tensor

from firecaffe.cluster.world import World
from firecaffe.data import SampleOrder
from firecaffe.data.batches import PrefetchedBatches, TrainBatches
from firecaffe.data.decode import DecodedSet
from firecaffe.data.packed import PackedPart
from firecaffe.data.shard import ShardInfo
from firecaffe.data.shard_files import ShardFiles
from firecaffe.errors import CheckpointError, DataError, RecipeError
from firecaffe.training.checkpoint import STATE, Checkpoint
from firecaffe.training.plugins import VARIABLE as PLUGINS
from firecaffe.training.plugins import Plugin
from firecaffe.training.saver import Write

VARIABLE = "FAULTS_ON_PURPOSE"


def environment(*faults: str) -> dict[str, str]:
    """What makes these faults, each `KIND:WORD=VALUE,…`, happen in a training that is started with
    it.
    """
    return {PLUGINS: __name__, VARIABLE: " ".join(faults)} if faults else {}


KIND_NAMES = {int: "a whole number", float: "a number", str: "text"}
"""What a word's value must be, for people."""


@dataclass(frozen=True)
class Injection:
    """One fault: what, on which rank, from which step on (counted from 1)."""

    kind: str
    rank: int = 0
    step: int = 1
    factor: float = 2.0
    """How many times longer a slow rank takes."""
    rate: str = "10mbit"
    """What is left of a slow link."""
    attempt: int = 0
    """In which attempt at the run: 0 is the first, before any restart."""


def parse(text: str) -> Injection:
    """From `KIND` or `KIND:WORD=VALUE,…`. Raises: RecipeError."""
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise RecipeError(f"{VARIABLE} {text}: no kind {kind!r}; there are {', '.join(KINDS)}")
    types: dict[str, type[int | float | str]] = {
        "rank": int,
        "step": int,
        "attempt": int,
        "factor": float,
        "rate": str,
    }
    words: dict[str, int | float | str] = {}
    for part in filter(None, rest.split(",")):
        word, _, value = part.partition("=")
        if word not in types:
            raise RecipeError(f"{VARIABLE} {text}: no word {word!r}; there are {', '.join(types)}")
        try:
            words[word] = types[word](value)
        except ValueError:
            raise RecipeError(
                f"{VARIABLE} {text}: {word} is {value!r}; it must be {KIND_NAMES[types[word]]}"
            ) from None
    injection = Injection(kind, **words)  # type: ignore[arg-type]
    is_slower = 1 <= injection.factor < float("inf")
    if injection.rank < 0 or injection.step < 1 or not is_slower or injection.attempt < 0:
        raise RecipeError(
            f"{VARIABLE} {text}: rank and attempt count from 0, step and factor from 1"
        )
    return injection


def plugin() -> "OnPurpose":
    """The faults that the environment names. Raises: RecipeError if it names none."""
    texts = os.environ.get(VARIABLE, "").split()
    if not texts:
        raise RecipeError(
            f"{VARIABLE} names no fault; it holds KIND:rank=R,step=S …, as in kill:rank=1"
        )
    return OnPurpose(tuple(parse(text) for text in texts))


@dataclass(frozen=True)
class OnPurpose(Plugin):
    """Faults, each for a rank, a step and an attempt."""

    injections: tuple[Injection, ...]

    def check(self, world_size: int) -> None:
        """Raises: RecipeError where a fault is for a rank, or a link, that there is not."""
        for each in self.injections:
            if each.rank >= world_size:
                raise RecipeError(
                    f"{VARIABLE} {each.kind}: rank is {each.rank}; there are ranks 0 to "
                    f"{world_size - 1}"
                )
            if each.kind.startswith("link_"):
                _check_emulated()

    def around_batches(self, batches: TrainBatches, world: World) -> TrainBatches:
        """The batches with what is to happen in this rank; they themselves where nothing is.

        Raises: RecipeError where a shard is to be truncated and none is read.
        """
        here = world.rank, world.attempt
        own = [each for each in self.injections if (each.rank, each.attempt) == here]
        faults = [IN_STEP[each.kind](each) for each in own if each.kind in IN_STEP]
        faults += [
            _once(partial(_truncate_shards, batches))(each)
            for each in own
            if each.kind == TRUNCATED_SHARD
        ]
        return FaultyBatches(batches, tuple(faults)) if faults else batches

    def around_write(self, write: Write, world: World) -> Write:
        """What writes checkpoints, refused or damaging."""
        for each in self.injections:
            if each.kind in IN_SAVER and each.attempt == world.attempt:
                write = IN_SAVER[each.kind](each, write)
        return write


def _check_emulated() -> None:
    own = os.stat("/proc/self/ns/net").st_ino
    if not any(path.stat().st_ino == own for path in Path("/run/netns").glob("*")):
        raise RecipeError(f"{VARIABLE} link_…: only on the hosts of an emulated cluster")


@dataclass(frozen=True)
class FaultyBatches:
    """Batches before which something happens."""

    batches: TrainBatches
    faults: tuple[Callable[[int], None], ...]
    """Called with the step under way, counted from 1, before each micro-batch."""

    @property
    def order(self) -> SampleOrder:
        return self.batches.order

    def train_batch(self, step: int, leaf: int) -> tuple[Tensor, Tensor]:
        for fault in self.faults:
            fault(step + 1)
        return self.batches.train_batch(step, leaf)


def _once(fault: Callable[[Injection], None]) -> Callable[[Injection], Callable[[int], None]]:
    """A fault that happens once, as soon as its step is there."""

    def make(injection: Injection) -> Callable[[int], None]:
        done = False

        def at(step: int) -> None:
            nonlocal done
            if not done and step >= injection.step:
                done = True
                fault(injection)

        return at

    return make


def _kill(_: Injection) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _freeze(_: Injection) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _preempt(_: Injection) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _kill_launcher(_: Injection) -> None:
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        raise RecipeError(f"{VARIABLE} launcher_killed: nobody has launched this rank")
    launcher = os.getppid()
    os.kill(launcher, signal.SIGKILL)
    while os.getppid() == launcher:  # its memory goes first; a short run might end meanwhile
        time.sleep(0.001)


def _fail(_: Injection) -> None:
    raise ArithmeticError("injected exception")


def _fill_memory(_: Injection) -> None:
    torch.empty(1 << 50, dtype=torch.uint8)  # a petabyte: the allocator's own refusal


def _end_data(injection: Injection) -> None:
    raise DataError(f"injected: the data of rank {injection.rank} end here")


@dataclass(frozen=True)
class _CutFiles:
    """Shards that end in the middle, as a file system gives them."""

    files: ShardFiles

    def read(self, info: ShardInfo, start: int, length: int) -> bytes:
        return self.files.read(info, start, max(0, min(length, info.num_bytes // 2 - start)))

    def size(self, info: ShardInfo) -> int:
        return info.num_bytes // 2

    def name(self, info: ShardInfo) -> str:
        return self.files.name(info)

    def drop_damaged(self, info: ShardInfo) -> None:
        self.files.drop_damaged(info)


def _truncate_shards(batches: TrainBatches, _: Injection) -> None:
    dataset = batches.batches.dataset if isinstance(batches, PrefetchedBatches) else None
    if not isinstance(dataset, DecodedSet) or not isinstance(dataset.source, PackedPart):
        raise RecipeError(f"{VARIABLE} truncated_shard: only while packed photos are read")
    dataset.source.files = _CutFiles(dataset.source.files)


def _cut_link(_: Injection) -> None:
    _in_namespace(["ip", "link", "set", _link(), "down"])


def _slow_link(injection: Injection) -> None:
    limits = ["rate", injection.rate, "burst", "72kb", "limit", "1mb"]
    _in_namespace(["tc", "qdisc", "replace", "dev", _link(), "root", "tbf", *limits])


def _link() -> str:
    """The one link of an emulated host."""
    return next(name for name in psutil.net_if_addrs() if name != "lo")


def _in_namespace(command: list[str]) -> None:
    _check_emulated()
    subprocess.run(command, check=True, capture_output=True)


def _slow(injection: Injection) -> Callable[[int], None]:
    """Sleeps after each micro-batch for as long as it takes to be `factor` times slower."""
    last_s = float("nan")

    def at(step: int) -> None:
        nonlocal last_s
        if step >= injection.step and last_s == last_s:
            time.sleep(min(1.0, time.thread_time() - last_s) * (injection.factor - 1))
        last_s = time.thread_time()

    return at


def _fill_disk(injection: Injection, write: Write) -> Write:
    """Refuses the first checkpoint from a step on."""
    done = False

    def refused(folder: Path, checkpoint: Checkpoint) -> Path:
        nonlocal done
        if done or checkpoint.step < injection.step:
            return write(folder, checkpoint)
        done = True
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise CheckpointError(f"checkpoint of step {checkpoint.step} not saved: {full}")

    return refused


def _damage(cut: bool) -> Callable[[Injection, Write], Write]:
    """Truncates the state of the first checkpoint from a step on, or flips one of its bits."""

    def make(injection: Injection, write: Write) -> Write:
        done = False

        def damaging(folder: Path, checkpoint: Checkpoint) -> Path:
            nonlocal done
            path = write(folder, checkpoint)
            if not done and checkpoint.step >= injection.step:
                done = True
                with open(path / STATE, "r+b") as file:
                    middle = file.seek(0, os.SEEK_END) // 2
                    if cut:
                        file.truncate(middle)
                    else:
                        file.seek(middle)
                        byte = file.read(1)[0]
                        file.seek(middle)
                        file.write(bytes([byte ^ 1]))
            return path

        return damaging

    return make


IN_STEP: dict[str, Callable[[Injection], Callable[[int], None]]] = {
    "kill": _once(_kill),
    "freeze": _once(_freeze),
    "slow": _slow,
    "data_end": _once(_end_data),
    "exception": _once(_fail),
    "out_of_memory": _once(_fill_memory),
    "link_cut": _once(_cut_link),
    "link_slow": _once(_slow_link),
    "launcher_killed": _once(_kill_launcher),
    "preempt": _once(_preempt),
}

IN_SAVER: dict[str, Callable[[Injection, Write], Write]] = {
    "disk_full": _fill_disk,
    "truncated_checkpoint": _damage(cut=True),
    "flipped_byte_checkpoint": _damage(cut=False),
}

TRUNCATED_SHARD = "truncated_shard"

KINDS = (*IN_STEP, TRUNCATED_SHARD, *IN_SAVER)
