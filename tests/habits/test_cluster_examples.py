"""The files of examples/clusters: by Kubernetes' own schemas, and run by a Slurm of stand-ins."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from firecaffe.cli.train import make_parser
from firecaffe.cluster.hosts import Hosts, check_hosts_options
from firecaffe.errors import PreemptedError
from tests.kit.models_pages import page

FOLDER = Path(__file__).parents[2] / "examples" / "clusters"
MANIFEST = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text("utf-8")))


def test_kubernetes_takes_the_manifest() -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    assert [validate(each, "1.30", strict=True) for each in MANIFEST] == ["1.30"] * 2


PARTS = [
    yaml.safe_load(part)
    for part in re.findall(r"```yaml\n(.*?)```", page("docs/howto/kubernetes.md"), re.S)
]


def merged(into: Any, part: Any) -> Any:
    """`into` with `part`; a list's items are matched by their names."""
    if isinstance(into, dict):
        return into | {key: merged(into.get(key), value) for key, value in part.items()}
    if isinstance(into, list):
        here, there = ({each["name"]: each for each in items} for items in (into, part))
        return list(merged(here, there).values())
    return part


@pytest.mark.parametrize("part", PARTS)
def test_kubernetes_takes_the_parts_of_the_page(part: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    job = merged(MANIFEST[1], part)
    assert validate(job, "1.30", strict=True) == "1.30"
    (container,) = job["spec"]["template"]["spec"]["containers"]
    for rule in job["spec"].get("podFailurePolicy", {"rules": []})["rules"]:
        assert rule["onExitCodes"]["containerName"] == container["name"]
        assert rule["onExitCodes"]["values"] == [PreemptedError.exit_code]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in job["spec"]["template"]["spec"]["volumes"]}


def test_the_pods_find_each_other() -> None:
    service, job = MANIFEST
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    words = pod["containers"][0]["args"]
    options = dict(word.removeprefix("--").split("=") for word in words)
    assert options["rdzv-endpoint"].startswith(f"{name}-0.{pod['subdomain']}:")
    assert int(options["nnodes"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    make_parser().read(["recipe.toml", *words])  # knows all words
    nodes, ranks = int(options["nnodes"]), int(options["nproc-per-node"])
    check_hosts_options(Hosts(ranks, nodes, nodes, "localhost:29500", options["rdzv-id"]))


def a_checkpoint(run: Path, when: int) -> None:
    step = run / "checkpoints" / "step-00000100"
    step.mkdir(parents=True)
    os.utime(step, (when, when))


def stand_in(folder: Path, name: str, script: str) -> str:
    """A path on which a program of that name is the script."""
    (folder / name).write_text(f"#!/bin/bash\n{script}\n")
    (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_a_pod_that_comes_back_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    container = MANIFEST[1]["spec"]["template"]["spec"]["containers"][0]
    path, job = stand_in(tmp_path, "firecaffe", 'echo "$PWD:" "$@"'), tmp_path / "job"
    words = {env["name"]: env.get("value", "") for env in container["env"]} | {"JOB": str(job)}

    def said() -> str:
        command = [*container["command"], *container["args"]]
        return subprocess.check_output(command, env={"PATH": path, **words}, text=True)

    first = f"{job}: train /shared/recipe.toml"
    assert said().startswith(f"{first} --nproc-per-node=")
    (job / "runs" / "lost-at-once").mkdir(parents=True)
    assert said().startswith(f"{first} --nproc-per-node=")
    for when, name in enumerate(["b", "a"]):
        a_checkpoint(job / "runs" / name, when)
        assert said().startswith(f"{first} --resume runs/{name} --nproc-per-node=")


def run_job(folder: Path, exit_code: int, restart: str | None = None) -> tuple[int, list[str]]:
    """The job's exit code, and the commands that it gave."""
    said = folder / "said"
    said.unlink(missing_ok=True)
    for name, code in (("srun", exit_code), ("scontrol", 0)):
        path = stand_in(folder, name, f'echo {name} "$@" >> "{said}"\nexit {code}')
    words = {"PATH": path, "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "firecaffe"}
    if restart:
        words["SLURM_RESTART_COUNT"] = restart
    command = ["bash", str(FOLDER / "slurm.sbatch"), "RECIPE.toml"]
    done = subprocess.run(command, cwd=folder, env=words)
    return done.returncode, said.read_text().splitlines()


TRAIN = "srun firecaffe train RECIPE.toml --run.folder runs/firecaffe-7"
EVERY = " --checkpoint.every 500"


def test_a_job_of_slurm(tmp_path: Path) -> None:
    assert run_job(tmp_path, 0) == (0, [TRAIN + EVERY])
    assert run_job(tmp_path, 13) == (13, [TRAIN + EVERY])
    assert run_job(tmp_path, 75) == (75, [TRAIN + EVERY, "scontrol requeue 7"])


def test_a_requeued_job_goes_on_from_its_own_newest_checkpoint(tmp_path: Path) -> None:
    def said(number: int) -> list[str]:
        return run_job(tmp_path, 0, str(number))[1]

    assert said(1) == [f"{TRAIN}-1{EVERY}"]  # requeued before there was a folder
    for number, last in enumerate(["firecaffe-7", "firecaffe-7-1"], start=1):
        a_checkpoint(tmp_path / "runs" / last, number)
        assert said(number) == [f"{TRAIN}-{number}{EVERY} --resume runs/{last}"]
    for other in ("firecaffe-70", "firecaffe-7-20"):  # of another job
        a_checkpoint(tmp_path / "runs" / other, 9)
    (tmp_path / "runs" / "firecaffe-7-2").mkdir()  # ended before its first checkpoint
    assert said(3) == [f"{TRAIN}-3{EVERY} --resume runs/firecaffe-7-1"]
