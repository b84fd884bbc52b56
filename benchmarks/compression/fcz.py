"""How small a .fcz file is, and how long it takes: made networks of published shares, and others.

    python -m benchmarks.compression.fcz --page benchmarks/results/fcz.md \\
        [--nncodec PYTHON] [--rounds 5]

Each file is decoded and compared to the bit before it is timed. Memory is that of a fresh process.
"""

import argparse
import gzip
import json
import lzma
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save
from torch import Tensor

from benchmarks.compression.fcz_networks import ROUNDS, Tensors, all_made, digits, errors, train
from firecaffe.compression import fcz
from firecaffe.runs.environment import commit, cpu_name

PEAK = """
import sys
from firecaffe.compression import fcz
def status(word):
    return next(int(x.split()[1]) for x in open("/proc/self/status") if x.startswith(word)) * 1024
def decode(path):
    with fcz.read(path) as file:
        for each in file.tensors():
            del each
decode(sys.argv[1])
with fcz.read(sys.argv[2]) as file:
    largest = max(each.num_bytes for each in file.outlines)
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
decode(sys.argv[2])
print(status("VmHWM") - before - largest)
"""
"""Beyond the largest tensor, after a first small file: what is loaded once is not counted."""

PAGE = """# A .fcz file: how small, and how fast

    {command}

{cpu}, {cores} cores of which one is used, commit {commit}, {date}. Each file was decoded and
compared to the bit before it was timed; n = {rounds}, medians and ranges. Rates are by the
processor's time of the one thread, not by the clock, for the machine is shared.

## Published networks

Weights are made, for there is no ImageNet here: places at random with the kept share of each layer,
values from the tails of a normal distribution, shared by k-means with as many bits (Han, Mao and
Dally 2016, tables 4 and 5; Iandola et al. 2016, table 2); biases are float32. Bytes are the whole
file's. The entropy is that of each element by itself, with the codebooks.

| network | weights | published, MB | `best`, MB | to published | to the entropy | `huffman`, MB |
|---|---|---|---|---|---|---|
{sizes}

| network | way | encoding, MB/s | decoding, MB/s | memory beyond the largest tensor, MB |
|---|---|---|---|---|
{speeds}

MB/s are of decoded float32. Places at random are the worst case: those of a trained network cost
less. Huffman took 3.2 bits for a distance of AlexNet's fc6, where places at random need 4.85.

## Beside other programs

LeNet-300-100 on MNIST, 266,610 weights of 4 bytes, pruned by magnitude in rounds and shared by
k-means (`benchmarks/compression/fcz_networks.py`; nothing is tuned, and the error is not the point
here). All but nncodec's uniform quantization have the same values, to the bit or, of nncodec's
codebook mode, to 0.002.

| {head} |
|---|{dashes}
{beside}

{nncodec}
"""

NNCODEC = """nncodec is version 2.1.3 (ISO/IEC 15938-17). *Indices* are whole numbers that it codes
exactly, to which 2 bytes for each value of a codebook are added. *Uniform* quantizes anew with
dependent quantizers; of 13 steps it is the smallest file whose error on the test images is at most
0.1 points above the checkpoint's. It is no coding of the same values, and may be smaller."""

ALLOWED = 0.001


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, help="where the result page goes")
    parser.add_argument("--nncodec", help="a Python that has nncodec 2.1.3; else it is left out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="a published network alone, without the rest")
    given = parser.parse_args()
    torch.set_num_threads(1)
    sizes, speeds = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "net.fcz")
        for name, published, make in all_made():
            if given.only not in ("", name):
                continue
            tensors = make()
            found = {}
            for code in ("best", "huffman"):
                found[code] = report = _written(path, tensors, code)
                speeds.append(
                    f"| {name} | `{code}` | {_speeds(path, tensors, code, given.rounds)} |"
                )
                print(speeds[-1], flush=True)
            report = found["best"]
            floor = sum(each.floor_bytes for each in report.tensors)
            weights = sum(each.size for each in report.tensors)
            ratio = report.num_bytes / published.megabytes / 1e6
            sizes.append(
                f"| {name} | {weights:,} | {published.megabytes} | {report.num_bytes / 1e6:.3f} | "
                f"{ratio:.3f} | {report.num_bytes / floor:.3f} | "
                f"{found['huffman'].num_bytes / 1e6:.3f} |"
            )
            print(sizes[-1], flush=True)
        if given.only:
            return 0
        beside = _beside(path, given.nncodec)
    words = {
        "command": "python -m benchmarks.compression.fcz"
        " --page benchmarks/results/fcz.md --nncodec PYTHON",
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "commit": commit(),
        "date": date.today().isoformat(),
        "rounds": given.rounds,
        "sizes": "\n".join(sizes),
        "speeds": "\n".join(speeds),
        "head": " | ".join(["bytes", *ROUNDS]),
        "dashes": "---|" * len(ROUNDS),
        "beside": "\n".join(beside),
        "nncodec": NNCODEC if given.nncodec else "nncodec was not there.",
    }
    page = PAGE.format(**words)
    if given.page:
        given.page.write_text(page)
    print(page)
    return 0


def _written(path: Path, tensors: Tensors, code: fcz.How) -> fcz.FileReport:
    """Writes, and compares what is decoded to the bit."""
    report = fcz.write(path, tensors, {}, code=code)
    with fcz.read(path) as file:
        for name, array in file.tensors():
            assert array.tobytes() == tensors[name].tobytes(), name
    return report


def _speeds(path: Path, tensors: Tensors, code: fcz.How, rounds: int) -> str:
    megabytes = sum(each.nbytes for each in tensors.values()) / 1e6
    encoding, decoding = [], []
    for _ in range(rounds):
        start = time.process_time()
        fcz.write(path, tensors, {}, code=code)
        encoding.append(megabytes / (time.process_time() - start))
        start = time.process_time()
        with fcz.read(path) as file:
            for _ in file.tensors():
                pass
        decoding.append(megabytes / (time.process_time() - start))
    first = path.with_name("first.fcz")
    fcz.write(first, {"w": np.tile(np.eye(64, dtype=np.float32), (4, 4))}, {})
    done = subprocess.run(
        [sys.executable, "-c", PEAK, first, path],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},  # what is let go is given back
        capture_output=True,
        text=True,
        check=True,
    )
    return f"{_range(encoding)} | {_range(decoding)} | {int(done.stdout) / 1e6:.2f}"


def _range(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def _beside(path: Path, nncodec: str | None) -> list[str]:
    """The rows of the second table: a column for each pruned network."""
    images, labels, test_images, test_labels = digits()
    rows: dict[str, list[str]] = {}

    def add(row: str, value: str) -> None:
        rows.setdefault(row, []).append(value)

    for name in ROUNDS:
        tensors = train(images, labels, name)
        error = errors(tensors, test_images, test_labels)
        report = _written(path, tensors, "best")
        raw = save(tensors)
        packed = path.with_name("net.npz")
        np.savez_compressed(packed, **tensors)  # type: ignore[arg-type]
        add("error on the test images", f"{error:.2%}")
        add("**`.fcz`**", f"**{report.num_bytes:,}** ({report.ratio:.1f} times)")
        add("`.fcz`, `huffman`", f"{_written(path, tensors, 'huffman').num_bytes:,}")
        add(
            "entropy, element by element",
            f"{sum(each.floor_bytes for each in report.tensors):,.0f}",
        )
        add("xz -9e of safetensors", f"{len(lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)):,}")
        add("gzip -9 of safetensors", f"{len(gzip.compress(raw, 9)):,}")
        add(".npz, compressed", f"{packed.stat().st_size:,}")
        add("safetensors", f"{len(raw):,}")
        if nncodec:
            _add_nncodec(add, nncodec, packed, error, report.num_bytes, (test_images, test_labels))
        print(name, {row: values[-1] for row, values in rows.items()}, flush=True)
    return [f"| {row} | {' | '.join(values)} |" for row, values in rows.items()]


def _add_nncodec(
    add: Callable[[str, str], None],
    python: str,
    packed: Path,
    error: float,
    own: int,
    test: tuple[Tensor, Tensor],
) -> None:
    script = Path(__file__).with_name("fcz_nncodec.py")
    command: list[str | Path] = [python, script, packed, packed.parent]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    sizes = json.loads(done.stdout.splitlines()[-1])
    add(
        "nncodec, indices and codebooks",
        f"{sizes['exact']:,} (ours {own / sizes['exact']:.3f} of it)",
    )
    add(
        "nncodec, codebook mode",
        f"{sizes['codebook']:,} (ours {own / sizes['codebook']:.3f} of it)",
    )
    fitting = []
    for qp, size in sizes["uniform"].items():
        decoded = dict(np.load(packed.parent / f"{qp}.npz"))
        wrong = errors(decoded, *test)
        fitting += [(size, qp, wrong)] if wrong <= error + ALLOWED else []
    found = "no step was as accurate"
    if fitting:
        size, qp, wrong = min(fitting)
        found = f"{size:,} (QP {qp}, error {wrong:.2%})"
    add("nncodec, uniform", found)


if __name__ == "__main__":
    raise SystemExit(main())
