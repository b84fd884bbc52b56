"""`firecaffe verify` for every exchange that adds in tree order and every compressor.

    python benchmarks/training/identity.py [--photos FOLDER] > benchmarks/results/identity.md

Each row trains one network on 1, 2, 3 and 4 workers and compares every weight, buffer, optimizer
state and loss after every step. Rows of one network without a compressor must also agree among each
other, for the exchange changes no bit either. `double_tree`, `ring` and `native` are controls: they
add in another order. With an image folder the network NiN for ImageNet trains on its photos. Exit
code 1: a row that must be identical is not.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from firecaffe.exchange import EXCHANGES
from firecaffe.exchange.route import keeps_tree_order
from firecaffe.gradients.compressors import COMPRESSORS
from firecaffe.runs.environment import commit, cpu_name

WORKERS = "1,2,3,4"
NETWORKS = ("nin_small", "googlenet_small_bn")
LARGER = "nin_cifar"
IN_ORDER = [name for name in EXCHANGES if keeps_tree_order(name)]
OTHERS = [name for name in EXCHANGES if not keeps_tree_order(name)]
SOCKETS = "--exchange.shared_memory=false"

GENERATED = """
[data]
name = "generated"
pad = 2
mirror = true
[train]
global_batch_size = 32
micro_batch_size = 4
eval_batch_size = 1000
[solver]
base_lr = 0.01
weight_decay = 0.0005
[exchange]
bucket_bytes = 100_000
"""

PHOTOS = """
[data]
name = "folder"
path = "{folder}"
resize = 256
crop = 224
mirror = true
[train]
global_batch_size = 8
micro_batch_size = 2
[solver]
base_lr = 0.01
weight_decay = 0.0005
"""

HEAD = """# The number of workers changes no bit

`python benchmarks/training/identity.py{photos}` on {cpu}, commit {commit}. Every row is one
`firecaffe verify` on {workers} workers: 4 steps of 8 micro-batches of 4 images, generated data
with augmentation, SGD with momentum and weight decay, buckets of 100 kB; `nin` 2 steps of 4
micro-batches of 2 photos of 3 x 224 x 224. Compared after every step: every weight, buffer,
optimizer state and loss. 3 workers have unequal shares and take `fold`. With shared_memory=false
all messages go through sockets.

| network | words of the recipe | verdict |
|---|---|---|"""


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--photos", type=Path, help="a folder with train/CLASS and test/CLASS")
    photos: Path | None = parser.parse_args().photos
    given = " --photos FOLDER" if photos else ""
    print(HEAD.format(photos=given, cpu=cpu_name(), commit=commit()[:12], workers=WORKERS))
    with tempfile.TemporaryDirectory() as folder:
        generated = Path(folder) / "generated.toml"
        generated.write_text(GENERATED, encoding="utf-8")
        of_photos = Path(folder) / "photos.toml"
        verdicts = {
            (network, *words): report(generated, network, words, steps=4)
            for network, words in rows()
        }
        if photos is not None:
            of_photos.write_text(PHOTOS.format(folder=photos.resolve()), encoding="utf-8")
            for words in ([], *([f"--exchange.algorithm={name}", SOCKETS] for name in IN_ORDER)):
                verdicts["nin", *words] = report(of_photos, "nin", words, steps=2)
    faults = find_faults(verdicts)
    print(f"\n{chr(10).join(faults) or 'Every row is as it must be.'}")
    if faults:
        raise SystemExit(1)


def rows() -> Iterator[tuple[str, list[str]]]:
    """(network, words) of every comparison on generated data."""
    for network in NETWORKS:
        yield network, []
        for exchange in IN_ORDER:
            yield network, [f"--exchange.algorithm={exchange}", SOCKETS]
        for compressor in COMPRESSORS:
            yield network, [f"--exchange.compressor={compressor}", "--exchange.compressor_level=1"]
    for exchange in OTHERS:
        yield NETWORKS[0], [f"--exchange.algorithm={exchange}", SOCKETS]
    yield LARGER, [SOCKETS]


def find_faults(verdicts: Mapping[tuple[str, ...], str]) -> list[str]:
    """Rows that must be identical and are not, or not to others of their network."""
    faults: list[str] = []
    first: dict[str, str] = {}
    for (network, *words), verdict in verdicts.items():
        is_control = any(
            word == f"--exchange.algorithm={name}" for word in words for name in OTHERS
        )
        if is_control:
            continue
        is_coded = any(word.startswith("--exchange.compressor=") for word in words)
        expected = verdict if is_coded else first.setdefault(network, verdict)
        if not verdict.startswith("identical:") or verdict != expected:
            faults.append(f"{network} {' '.join(words)}: {verdict}")
    return faults


def report(recipe: Path, network: str, words: list[str], steps: int) -> str:
    """Prints the row of one `firecaffe verify` and returns its verdict: its last line."""
    command = [sys.executable, "-m", "firecaffe", "verify", str(recipe), *words]
    command += ["--nproc-per-node", WORKERS, "--model.name", network, "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    verdict = (done.stderr or done.stdout).splitlines()[-1].removeprefix("firecaffe: ")
    said = ", ".join(word.removeprefix("--exchange.") for word in words) or "as they are by default"
    print(f"| {network} | {said} | {verdict} |", flush=True)
    return verdict


if __name__ == "__main__":
    main()
