"""Damages files of each kind that firecaffe reads, and counts what comes of it.

    python -m benchmarks.faults.fuzz --page benchmarks/results/fuzz.md    # all readers: hours
    python -m benchmarks.faults.fuzz --reader checkpoint --mutations 10000
    python -m benchmarks.faults.fuzz --reader checkpoint --only 17        # one, with its traceback

A file is to be read, or refused in one line: no error that is not firecaffe's, no hang, no memory
that a claim in it asks for. Reads are done in a process of their own, which may die.
"""

import argparse
import os
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.faults.fuzzed.attempt import HANGS, READ, REFUSED, SECONDS, Files, Outcome
from benchmarks.faults.fuzzed.readers import READERS
from benchmarks.kit.paragraph import paragraph
from firecaffe.runs.environment import commit, cpu_name

HEAD = ("reader", "mutations", "read", "refused", "not ours", "hangs", "MB above", "commit")

PAGE = """# Fuzz: damaged files

    python -m benchmarks.faults.fuzz --page benchmarks/results/fuzz.md

{about}

{table}
"""

ABOUT = """Each reader gets its own kind of files, of which one is damaged by one to four changes:
bits, bytes, spans and numbers; of texts words and lines, of JSON values of other kinds; and one in
a hundred times the file is a pipe, a folder, a device without an end, missing or empty. Read or
refused: it came back, or raised one of firecaffe's errors, which is one line and an exit code. Not
ours: any other error, and a process that died. Hangs: more than {seconds} seconds. MB above: the
most memory that a read took beyond the process's own and what the files hold. {cpu}, torch {torch},
{date}."""


@dataclass
class Tally:
    """What came of a reader's mutations."""

    name: str
    mutations: int = 0
    words: Counter[str] = field(default_factory=Counter)
    examples: dict[str, int] = field(default_factory=dict)
    extra_bytes: int = 0
    most: int = 0
    """The mutation that took the most memory."""

    def add(self, number: int, outcome: Outcome) -> None:
        self.mutations += 1
        self.words[outcome.word] += 1
        self.examples.setdefault(outcome.word, number)
        if outcome.extra_bytes > self.extra_bytes:
            self.extra_bytes, self.most = outcome.extra_bytes, number

    @property
    def not_ours(self) -> int:
        return sum(n for word, n in self.words.items() if word not in (READ, REFUSED, HANGS))

    @property
    def cells(self) -> tuple[str, ...]:
        counts = self.mutations, self.words[READ], self.words[REFUSED], self.not_ours
        numbers = [f"{each:,}" for each in (*counts, self.words[HANGS])]
        return (self.name, *numbers, f"{self.extra_bytes / 1e6:.1f}", commit()[:7])


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--reader", action="append", choices=READERS, help="default: all")
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one mutation, here, with its traceback")
    parser.add_argument("--page", type=Path, help="where the readers' rows go; others stay")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tallies = []
    for name in options.reader or READERS:
        with tempfile.TemporaryDirectory() as folder:
            if options.only is not None:
                outcome = _files(name, Path(folder)).attempt(
                    _seed(name, options.seed, options.only)
                )
                print(f"{outcome.word}; {outcome.extra_bytes / 1e6:.1f} MB\n{outcome.traceback}")
                continue
            tallies.append(fuzz(name, options.mutations, options.seed, Path(folder)))
        _show(tallies[-1])
        if options.page:
            write_page(options.page, tallies)
    return int(any(each.not_ours or each.words[HANGS] for each in tallies))


def fuzz(name: str, mutations: int, seed: int, folder: Path) -> Tally:
    """Tries a reader in a process that is replaced when it dies."""
    tally, number = Tally(name), 0
    files = _files(name, folder)
    while number < mutations:
        number = _until_one_dies(tally, files, range(number, mutations), seed)
    return tally


def _files(name: str, folder: Path) -> Files:
    files = Files(READERS[name], folder / "files")
    whole = files.read_whole()
    if whole.word != READ:
        raise SystemExit(f"{name}: whole files give {whole.word}\n{whole.traceback}")
    return files


def _seed(name: str, seed: int, number: int) -> str:
    return f"{name} {seed} {number}"


def _until_one_dies(tally: Tally, files: Files, numbers: range, seed: int) -> int:
    """Tries mutations in a child. Returns the number of the first that was not tried."""
    sys.stdout.flush()
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.close(reads)
        _be_child(writes, tally.name, files, numbers, seed)
    os.close(writes)
    with os.fdopen(reads, "rb", buffering=0) as told:
        said = b""
        for number in numbers:
            while b"\n" not in said:
                ready, _, _ = select.select([told], [], [], 2 * SECONDS)
                part = told.read(4096) if ready else b""
                if not part:
                    tally.add(number, Outcome(_end(child, is_silent=not ready), 0))
                    files.mend()
                    return number + 1
                said += part
            line, _, said = said.partition(b"\n")
            word, _, extra = line.decode().rpartition("\t")
            tally.add(number, Outcome(word, int(extra)))
            if number % 1000 == 999:
                print(f"{tally.name}: {number + 1}", flush=True)
    os.waitpid(child, 0)
    return numbers.stop


def _end(child: int, is_silent: bool) -> str:
    """Ends a child that says no more, and returns what has happened to it."""
    if is_silent:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return HANGS
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return f"died: {signal.Signals(-code).name if code < 0 else code}"


def _be_child(writes: int, name: str, files: Files, numbers: range, seed: int) -> None:
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        files.read_whole()  # pages of libraries are memory too, once they are touched
        for number in numbers:
            outcome = files.attempt(_seed(name, seed, number))
            word = " ".join(outcome.word.split())
            os.write(writes, f"{word}\t{outcome.extra_bytes}\n".encode())
    finally:
        os._exit(0)


def _show(tally: Tally) -> None:
    print(" | ".join(f"{a} {b}" for a, b in zip(HEAD, tally.cells, strict=True)))
    print(f"  most memory: --only {tally.most}")
    for word, times in tally.words.most_common():
        if word not in (READ, REFUSED):
            print(f"  {times} x {word}: --only {tally.examples[word]}")


def write_page(path: Path, tallies: list[Tally]) -> None:
    """Puts the readers' rows into the page; rows of others stay as they are."""
    rows: dict[str, str] = {}
    if path.is_file():
        lines = path.read_text().splitlines()
        old = [line for line in lines if line.startswith("| ") and not line.startswith("| reader")]
        rows = {line.split("|")[1].strip(): line for line in old if "---" not in line}
    rows |= {each.name: f"| {' | '.join(each.cells)} |" for each in tallies}
    order = sorted(rows, key=lambda name: ([*READERS].index(name) if name in READERS else 99, name))
    table = [f"| {' | '.join(HEAD)} |", "|" + " --- |" * len(HEAD), *(rows[name] for name in order)]
    about = ABOUT.format(
        seconds=SECONDS, cpu=cpu_name(), torch=torch.__version__, date=time.strftime("%Y-%m-%d")
    )
    path.write_text(PAGE.format(about=paragraph(about), table="\n".join(table)))


if __name__ == "__main__":
    raise SystemExit(main())
