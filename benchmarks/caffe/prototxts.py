"""Public prototxts, each imported as `firecaffe import` does it: how many whole, why not others.

    python -m benchmarks.caffe.prototxts FOLDER --out ROWS.jsonl [--caffe PYTHON --answers A.jsonl]
    python -m benchmarks.caffe.prototxts FOLDER --out ROWS.jsonl --page

FOLDER has files as OWNER+NAME/PATH, and sources.tsv: repository and commit. Files of the same bytes
are one, that of the first repository. Every file has a process of its own, with a limit of time and
of memory. With --caffe, the Python of a real Caffe, shapes of blobs and counts of parameters are
held against it, and its words tell which fields are a fork's; its answers are kept in A.jsonl.
"""

import argparse
import json
import multiprocessing
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from benchmarks.caffe import prototxts_page
from benchmarks.caffe.prototxts_file import UNKNOWN, Schema, image_of, kind_of, look, sha_of
from benchmarks.kit import raw_lines

FIRST = "BVLC+caffe"
"""What others have copied is counted as its own."""
PHASES = ("TRAIN", "TEST")
SECONDS, BYTES = 120, 12 << 30
"""Limits of one file."""
TEXT = (".prototxt", ".pt")


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="rows, in lines of JSON")
    parser.add_argument("--caffe", help="the Python of a real Caffe")
    parser.add_argument("--answers", type=Path, help="what that Caffe has said")
    parser.add_argument("--only", default="", help="files with that in their path")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--page", action="store_true", help="print the page of what OUT has")
    given = parser.parse_args()
    if not given.page:
        files = dict(distinct(given.folder))
        schema: Schema = {}
        answers: dict[tuple[str, str], dict[str, Any]] = {}
        if given.caffe:
            schema = json.loads(real_caffe(given.caffe, ["--schema"], ""))
            answers = ask(given.caffe, nets(files), given.answers)
        given.out.unlink(missing_ok=True)
        raw_lines.begin(given.out)
        tasks = [
            (given.folder, path, {p: answers.get((sha, p), {}) for p in PHASES}, schema)
            for path, sha in files.items()
            if given.only in str(path)
        ]
        for row in apart(tasks, given.jobs):
            raw_lines.append(given.out, {"kind": "file", **row})
    print(prototxts_page.page(given.folder, given.out))


def distinct(folder: Path) -> Iterator[tuple[Path, str]]:
    """Each file of other bytes than those before it, and its sha256."""
    seen = set()
    found = [each for each in folder.glob("*+*/**/*") if each.suffix in TEXT and each.is_file()]
    for path in sorted(found, key=lambda each: (not each.is_relative_to(folder / FIRST), each)):
        sha = sha_of(path)
        if sha not in seen:
            seen.add(sha)
            yield path, sha


def nets(files: Mapping[Path, str]) -> dict[Path, str]:
    """Those that a real Caffe can be asked about: without layers in Python."""
    return {
        path: sha
        for path, sha in files.items()
        if b"layer" in (content := path.read_bytes())
        and b'"Python"' not in content
        and b"'Python'" not in content
        and kind_of(path)[0] == "net"
    }


def ask(
    python: str, files: Mapping[Path, str], kept: Path
) -> dict[tuple[str, str], dict[str, Any]]:
    """A real Caffe's answers, by sha256 and phase; only what it has not said before is asked."""
    known = {(each["sha"], each["phase"]) for each in raw_lines.read(kept, "answer")}
    requests = [
        {
            "kind": "answer",
            "sha": sha,
            "path": str(path.absolute()),
            "phase": phase,
            "image": ",".join(map(str, image_of(path))),
        }
        for path, sha in files.items()
        for phase in PHASES
        if (sha, phase) not in known
    ]
    if requests:
        lines = "".join(f"{json.dumps(each)}\n" for each in requests)
        with kept.open("a") as file:
            file.write(real_caffe(python, [], lines))
    return {(each["sha"], each["phase"]): each for each in raw_lines.read(kept, "answer")}


def real_caffe(python: str, words: Sequence[str], given: str) -> str:
    script = Path(__file__).with_name("prototxts_oracle.py")
    done = subprocess.run(
        [python, str(script), *words], input=given, stdout=subprocess.PIPE, check=True, text=True
    )
    return done.stdout


def apart(tasks: Sequence[Sequence[Any]], jobs: int) -> Iterator[dict[str, Any]]:
    """What `look` gives for each, as it comes; `broke` is how a process has ended early."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")  # torch is there already
    left = list(reversed(tasks))
    running: dict[Any, Any] = {}
    while left or running:
        while left and len(running) < jobs:
            task = left.pop()
            end, own_end = context.Pipe(duplex=False)
            process = context.Process(target=_one, args=(own_end, task))
            process.start()
            own_end.close()
            running[end] = (task, process, time.monotonic() + SECONDS)
        for end in [*wait([*running], timeout=1), *_late(running)]:
            if end not in running:
                continue
            assert isinstance(end, Connection)
            task, process, _ = running.pop(end)
            process.kill() if not end.poll() else None
            try:
                yield end.recv()
            except EOFError:
                process.join()
                row = {"path": str(task[1].relative_to(task[0])), "what": "net", **UNKNOWN}
                yield {**row, "refused": {}, "equal": {}, "broke": f"ended with {process.exitcode}"}
            process.join()


def _late(running: Mapping[Any, Any]) -> list[Any]:
    now = time.monotonic()
    return [end for end, (_, _, until) in running.items() if now > until]


def _one(end: Connection, task: Sequence[Any]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    sys.stdout = sys.stderr
    end.send(look(*task))


if __name__ == "__main__":
    main()
