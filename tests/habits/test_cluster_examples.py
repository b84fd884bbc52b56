"""The files of examples/clusters: by Kubernetes' own schemas, and run by a Slurm of stand-ins."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from firecaffe.cli.options.train import make_parser
from firecaffe.cluster.hosts import Hosts, check_hosts_words

FOLDER = Path(__file__).parents[2] / "examples" / "clusters"
MANIFEST = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text("utf-8")))


def test_kubernetes_takes_the_manifest() -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    assert [validate(each, "1.30", strict=True) for each in MANIFEST] == ["1.30"] * 2


def test_the_pods_find_each_other() -> None:
    service, job = MANIFEST
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    program, command, recipe, *words = pod["containers"][0]["command"]
    assert (program, command) == ("firecaffe", "train")
    options = dict(word.removeprefix("--").split("=") for word in words)
    assert options["rdzv-endpoint"].startswith(f"{name}-0.{pod['subdomain']}:")
    assert int(options["nnodes"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    make_parser().read([recipe, *words])  # knows all words
    nodes, ranks = int(options["nnodes"]), int(options["nproc-per-node"])
    check_hosts_words(Hosts(ranks, nodes, nodes, "localhost:29500", options["rdzv-id"]))


def run_job(folder: Path, exit_code: int, **environment: str) -> tuple[int, list[str]]:
    """The job's exit code, and the commands that it gave."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, code in (("srun", exit_code), ("scontrol", 0)):
        program = programs / name
        program.write_text(f'#!/bin/bash\necho {name} "$@" >> {folder}/said\nexit {code}\n')
        program.chmod(0o755)
    (folder / "said").unlink(missing_ok=True)
    done = subprocess.run(
        ["bash", FOLDER / "slurm.sbatch", "RECIPE.toml"],
        cwd=folder,
        env={
            "PATH": f"{programs}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NAME": "firecaffe",
            **environment,
        },
    )
    return done.returncode, (folder / "said").read_text().splitlines()


TRAIN = "srun firecaffe train RECIPE.toml --run.folder runs/firecaffe-7"


def test_a_job_of_slurm(tmp_path: Path) -> None:
    assert run_job(tmp_path, 0) == (0, [TRAIN])
    assert run_job(tmp_path, 13) == (13, [TRAIN])
    assert run_job(tmp_path, 75) == (75, [TRAIN, "scontrol requeue 7"])
    for number, last in enumerate(["firecaffe-7", "firecaffe-7-1"], start=1):
        (tmp_path / "runs" / last).mkdir(parents=True)
        os.utime(tmp_path / "runs" / last, (number, number))
        code, said = run_job(tmp_path, 0, SLURM_RESTART_COUNT=str(number))
        assert (code, said) == (0, [f"{TRAIN}-{number} --resume runs/{last}"])
