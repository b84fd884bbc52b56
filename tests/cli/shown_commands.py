"""The commands that README and docs show, and what each needs so that it can be run here."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = (
    *("firecaffe", "python", ".venv/bin/python", "torchrun", "make", "pip"),
    *("srun", "sbatch", "mpirun", "kubectl"),
)


def _pages(folder: str) -> tuple[str, ...]:
    return tuple(sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(f"{folder}/*.md")))


GROUPS = {
    "README.md": ("README.md",),
    "CONTRIBUTING.md": ("CONTRIBUTING.md",),
    **{
        folder: pages
        for folder in ("docs", *(f"docs/{path.name}" for path in sorted(ROOT.glob("docs/*/"))))
        if (pages := _pages(folder))
    },
    "examples/photos": ("examples/photos/README.md",),
}
"""Pages whose commands are run in one folder, one after the other: those of a folder together.

Of a page that is made from code, these are the commands that stand in its source.
"""

NOT_RUN = {
    "make demo": "installs; its `firecaffe demo` has a test below",
    "make test": "this suite",
    "make lint": "a part of `make test`",
    "make soak": "hours of tests",
    "make docs": "a part of `make test`",
    "make help": "tests/unit/test_repository.py has its lines",
    "make wheel": "tests/cli/test_wheel.py builds, installs and runs",
    "torchrun --nnodes": "needs more hosts, which the command leaves open",
    "pip install": "installs: `make demo` and CI do so",
    "sbatch examples": "needs Slurm; with a stand-in: tests/habits/test_cluster_examples.py",
    "mpirun -np": "needs MPI; its variables: tests/unit/cluster",
    "kubectl create": "needs Kubernetes",
    "kubectl apply": "needs Kubernetes; its schemas: tests/habits/test_cluster_examples.py",
    "firecaffe train RECIPE.toml --nnodes": "needs more hosts: tests/cluster/test_membership.py",
    "python -m firecaffe train RECIPE.toml --nproc-per-node 3 --max-restarts": "needs a launcher "
    "that restarts: tests/faults/test_injected_faults.py",
    "firecaffe data get": "downloads: tests/unit/data",
    "firecaffe import": "needs files of Caffe's: tests/cli/test_import_caffe.py",
    "firecaffe train lenet_solver/": "what was imported: tests/cli/test_import_caffe.py",
    "firecaffe export caffenet": "what was imported: tests/cli/test_import_caffe.py",
    "python examples/caffe_to_onnx.py": "tests/cli/test_examples.py",
    **{
        f"firecaffe {command} lesson/": "what was imported: tests/cli/test_examples.py"
        for command in ("train", "predict", "compare", "export")
    },
    ".venv/bin/python -m pytest": "the rest of this suite",
}
"""How a command begins -> why it is not run."""

BATCH = "--train.global_batch_size 16 --train.micro_batch_size 4"
SHORT = f"--train.steps 2 {BATCH}"
TINY = "--train.steps 1 --train.global_batch_size 2 --train.micro_batch_size 1"
SHORTER = {
    r"firecaffe train .*--train.epochs": "",  # an epoch of the stand-in is one step
    r"firecaffe train recipes/\w+imagenet": TINY,
    r"firecaffe train .*--nproc-per-node 8": "--train.steps 2 "
    "--train.global_batch_size 64 --train.micro_batch_size 1",
    r"firecaffe train": SHORT,
    r"firecaffe verify": f"--steps 2 {BATCH}",
    r"firecaffe tune": "--budget 2 --seeds 2 --train.steps 128",
    r"firecaffe check": BATCH,
    r"firecaffe bench exchange": "-n 1 -e 256K",
    r"firecaffe bench data": "--images 8",
}
"""What a command looks like -> the words that make it short; the first that fits."""

EXIT_CODES = {"firecaffe tune": (0, 16, 17), "firecaffe compress": (0, 16)}
"""How a command begins -> what it may end with: a verdict on images that teach nothing is free."""

SLOW = (
    r"firecaffe (tune|compress|verify|check|compare --by|bench exchange|pack imagenet)",
    r"firecaffe evaluate .*\.fcz",
    r"firecaffe plan .* --cluster mine.toml",
    r"firecaffe train (RECIPE|recipes/(?!nin_small)|.*--(train.epochs|run.cluster))",
)
"""Run with `pytest -m slow`: what takes more than some seconds on a busy machine. The photos that
stand in for ImageNet are packed there too, for `plan` takes ImageNet's own figures without them."""

PREPARED = {
    "docs/tutorials": (f"firecaffe check RECIPE.toml --nproc-per-node 2 --write two.toml {BATCH}",),
    "README.md": tuple(
        f"firecaffe train recipes/nin_small.toml --nproc-per-node {ranks} {SHORT} "
        f"--run.folder runs/20261121-{time}-nin_small-{ranks}w"
        for ranks, time in ((1, "101500"), (2, "101700"))
    ),
}
"""Commands that make what a page's own take for there."""


@dataclass(frozen=True)
class Shown:
    """A command with the lines that are shown below it."""

    page: str
    text: str
    output: tuple[str, ...] = ()

    @property
    def reason_not_run(self) -> str:
        return next((why for begin, why in NOT_RUN.items() if self.text.startswith(begin)), "")

    @property
    def exit_codes(self) -> tuple[int, ...]:
        return next(
            (codes for begin, codes in EXIT_CODES.items() if self.text.startswith(begin)), (0,)
        )

    @property
    def is_slow(self) -> bool:
        return any(re.match(pattern, self.text) for pattern in SLOW)

    @property
    def shortened(self) -> str:
        more = next((words for like, words in SHORTER.items() if re.match(like, self.text)), "")
        return f"{self.text} {more}".strip()


def shown(page: str) -> list[Shown]:
    """The commands of a page's blocks of code."""
    return [
        found for block in _blocks((ROOT / page).read_text("utf-8")) for found in _of(page, block)
    ]


def snippets(page: str) -> list[str]:
    """The blocks of Python of a page."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.M | re.S)


def _blocks(text: str) -> Iterator[list[str]]:
    """Fenced ones without a language or of the shell, and indented ones."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S):
        if language in ("", "sh", "bash", "console"):
            yield block.splitlines()
    rest = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    for indented in re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", rest, re.M):
        yield [line[4:] for line in indented.splitlines()]


def _of(page: str, block: list[str]) -> Iterator[Shown]:
    text, output = "", []
    lines = iter(block)
    for line in lines:
        bare = re.sub(r"^\$ |^(sudo -E )?([A-Z_]+=\S+ )*", "", line)
        if bare.split(" ")[0] not in PROGRAMS:
            output.append(line)
            continue
        if text:
            yield Shown(page, text, tuple(output))
        while bare.endswith("\\"):
            bare = f"{bare[:-1].rstrip()} {next(lines).strip()}"
        text, output = re.sub(r"\s+#\s.*", "", bare).rstrip(), []
    if text:
        yield Shown(page, text, tuple(output))
