"""`firecaffe verify` for every exchange that adds in tree order, on several networks.

    python benchmarks/identity.py > benchmarks/results/identity.md

Each row trains one network on 1, 2, 3 and 4 workers with one exchange and compares every weight,
buffer, optimizer state and loss after every step. The rows of one network must also agree among
each other, for the exchange changes no bit either. `ring` and `native` are controls: they add in
another order.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from firecaffe.exchange import EXCHANGES
from firecaffe.exchange.order import keeps_tree_order
from firecaffe.runs.environment import cpu_name

WORKERS = "1,2,3,4"
STEPS = 4
NETWORKS = ("nin_small", "googlenet_small_bn")
LARGER = "nin_cifar"
RECIPE = """
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


def main() -> None:
    print("# The number of workers changes no bit\n")
    print(
        f"`python benchmarks/identity.py` on {cpu_name()}. Every row is one `firecaffe verify` on"
    )
    print(f"{WORKERS} workers: {STEPS} steps of 8 micro-batches of 4 images, generated data with")
    print(
        "augmentation, SGD with momentum and weight decay, buckets of 100 kB. Compared after every"
    )
    print("step: every weight, buffer, optimizer state and loss. 3 workers have unequal shares and")
    print("take `fold`.\n")
    print("| network | exchange | verdict |\n|---|---|---|")
    in_order = [name for name in EXCHANGES if keeps_tree_order(name)]
    rows = [(network, exchange) for network in NETWORKS for exchange in in_order]
    rows += [(NETWORKS[0], exchange) for exchange in EXCHANGES if exchange not in in_order]
    rows.append((LARGER, "tree"))
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.toml"
        recipe.write_text(RECIPE, encoding="utf-8")
        for network, exchange in rows:
            print(f"| {network} | {exchange} | {verify(recipe, network, exchange)} |", flush=True)


def verify(recipe: Path, network: str, exchange: str) -> str:
    """The last line of one `firecaffe verify`."""
    command = [sys.executable, "-m", "firecaffe", "verify", str(recipe)]
    command += ["--nproc-per-node", WORKERS, "--steps", str(STEPS)]
    command += ["--model.name", network, "--exchange.algorithm", exchange]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stderr or done.stdout).splitlines()[-1].removeprefix("firecaffe: ")


if __name__ == "__main__":
    main()
