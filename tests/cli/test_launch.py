"""What a user types, as processes of their own: train, verify, torchrun, and how runs fail."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from firecaffe.cluster.secret import SECRET
from firecaffe.faults import KINDS
from tests.loopback import has_ipv6
from tests.typed import TIMEOUT_S, Typed, firecaffe, python, torchrun

RECIPE = """
[model]
name = "lenet"
[data]
name = "generated"
[train]
global_batch_size = 16
micro_batch_size = 4
steps = 4
eval_batch_size = 500
[run]
tensorboard = false
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    path.write_text(RECIPE)
    return path


def result_of(run: Path) -> dict[str, object]:
    value: dict[str, object] = json.loads((run / "result.json").read_text())
    return value


def test_train_launches_ranks_and_torchrun_ranks_join(recipe: Path, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    done = firecaffe("train", recipe, "--nproc-per-node", "2", "--run.folder", ours)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert any("step 4/4" in line and "samples/s" in line for line in lines)
    assert any("top-1" in line for line in lines)
    assert not any("\x1b" in line for line in lines)  # plain where there is no terminal
    assert [line for line in lines if "run folder" in line] == [f"run folder: {ours}"]

    done = torchrun(3, "-m", "firecaffe", "train", recipe, "--run.folder", theirs)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"run folder: {theirs}\n") == 1
    assert result_of(ours)["world_size"] == 2
    assert result_of(theirs)["world_size"] == 3
    assert result_of(ours)["state_sha256"] == result_of(theirs)["state_sha256"]

    compared = firecaffe("compare", ours, theirs, "--json")
    assert compared.returncode == 0, compared.stderr
    assert json.loads(compared.stdout)["identical"] is True
    names = {path.name for path in ours.iterdir()}
    assert names == {
        "recipe.toml",
        "about.json",
        "environment.json",
        "forecast.json",
        "metrics.jsonl",
        "weights.jsonl",
        "timings",
        "checkpoints",
        "result.json",
    }
    assert {path.name for path in (theirs / "timings").iterdir()} == {
        "rank-0.jsonl",
        "rank-1.jsonl",
        "rank-2.jsonl",
        "round-trips-0.jsonl",
        "round-trips-1.jsonl",
        "round-trips-2.jsonl",
    }


def test_two_launchers_on_one_host_meet(recipe: Path, tmp_path: Path) -> None:
    host = "[::1]" if has_ipv6() else "127.0.0.1"
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"{host}:{free.getsockname()[1]}"
    words = ["--nnodes", "2", "--rdzv-endpoint", place, "--rdzv-id", "a run"]
    command = ["-m", "firecaffe", "train", recipe, "--run.folder", tmp_path / "run", *words]
    of_run = {SECRET: "that of these two hosts"}
    with (
        Typed(*command, environment=of_run) as first,
        Typed(*command, environment=of_run) as second,
    ):
        said = [first.communicate(), second.communicate()]
        assert [first.wait(), second.wait()] == [0, 0], said
    assert "".join(out for out, _ in said).count(f"run folder: {tmp_path / 'run'}\n") == 1
    assert result_of(tmp_path / "run")["world_size"] == 2


def test_verify_says_identical(recipe: Path) -> None:
    words = ["--nproc-per-node", "1,2", "--steps", "2"]
    done = firecaffe("verify", recipe, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("identical: 1, 2 workers, every tensor after")
    assert "run folder" not in done.stdout  # they were temporary


def test_verify_names_the_first_difference(recipe: Path) -> None:
    words = ["--nproc-per-node", "1,3", "--steps", "2", "--exchange.algorithm", "ring"]
    done = firecaffe("verify", recipe, *words)
    assert done.returncode == 7
    (line,) = done.stderr.splitlines()
    assert "1 and 3 workers differ from step 1 on, first in parameter/conv1." in line
    assert "ring does not add in the order of the micro-batch tree" in line


def test_the_master_port_of_torchruns_environment_in_use(recipe: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        environment = {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        done = firecaffe("train", recipe, environment=environment)
    assert done.returncode == 6
    own = [line for line in done.stderr.splitlines() if line.startswith("firecaffe: ")]
    assert own == [
        f"firecaffe: rank 0: 2 ranks did not meet at 127.0.0.1:{port}: "
        "the port is in use; choose another MASTER_PORT (--master-port)"
    ]
    assert "Traceback" not in done.stderr


BUSY = """
import sys, types
import torch
import torch.distributed as dist
from firecaffe import cli
from firecaffe.__main__ import run

def gather(argv):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for _ in range(300):
        dist.all_gather([torch.empty(1000000)], torch.zeros(1000000), async_op=True)
    print("gathering")
    return 0

busy = types.ModuleType("firecaffe.cli.busy")
busy.main = gather
sys.modules[busy.__name__] = busy
cli.COMMANDS["busy"] = ""
sys.argv = ["firecaffe", "busy"]
run()
"""
"""A command that is over while Gloo's threads still have tensors to let go of, which ended by
"terminate called without an active exception" in ten of ten runs.
"""


def test_a_ranks_end_does_not_wait_for_the_threads_of_its_process_group() -> None:
    options: Any = {"capture_output": True, "text": True, "timeout": TIMEOUT_S}
    command, environment = [sys.executable, "-c", BUSY], {**os.environ, "RANK": "0"}
    done = subprocess.run(command, env=environment, check=False, **options)
    assert (done.returncode, done.stdout, done.stderr) == (0, "gathering\n", "")


def test_a_killed_rank_ends_the_run_with_its_name(recipe: Path, tmp_path: Path) -> None:
    command = ["train", recipe, "--train.steps", 100000, "--nproc-per-node", 2]
    command += ["--run.folder", tmp_path / "run", "--train.eval_every", 1]
    command += ["--data.hold_out", 0.01]
    with Typed("-m", "firecaffe", *command) as process:
        for line in process.stdout:
            if "validation at step" in line:
                break
        launcher = psutil.Process(process.pid)
        ranks = launcher.children(recursive=True)
        _, victim = sorted(launcher.children(), key=lambda rank: (rank.create_time(), rank.pid))
        victim.send_signal(signal.SIGKILL)
        _, errors = process.communicate()
        assert process.wait() == KINDS["killed"].exit_code
    (line,) = errors.splitlines()
    assert re.match(r"firecaffe: rank 1 on \S+ was killed at step \d+: SIGKILL", line), line
    _, left = psutil.wait_procs(ranks, timeout=120)  # a process beside a rank ends just after it
    assert not left
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_killed_run_goes_on_from_its_checkpoint_to_the_same_bits(
    recipe: Path, tmp_path: Path
) -> None:
    """Two workers, killed; then one worker to the end; against three that were left alone."""
    words = ["--train.steps", "30", "--checkpoint.every", "4", "--data.hold_out", "0.01"]
    whole, killed, resumed = tmp_path / "whole", tmp_path / "killed", tmp_path / "resumed"
    done = firecaffe("train", recipe, *words, "--nproc-per-node", 3, "--run.folder", whole)
    assert done.returncode == 0, done.stderr

    start = ["train", recipe, *words, "--nproc-per-node", 2, "--run.folder", killed]
    with Typed("-m", "firecaffe", *start, "--train.eval_every", 1) as process:
        for line in process.stdout:
            if "validation at step 6:" in line:
                break
        for rank in psutil.Process(process.pid).children(recursive=True):
            rank.kill()
        process.communicate()
        assert process.wait() == KINDS["killed"].exit_code
    assert not (killed / "result.json").exists()

    done = firecaffe("train", recipe, *words, "--resume", killed, "--run.folder", resumed)
    assert done.returncode == 0, done.stderr
    assert result_of(resumed)["state_sha256"] == result_of(whole)["state_sha256"]
    first = json.loads((resumed / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] > 4  # it did go on from a checkpoint


def test_example_of_an_own_model(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "own_model.py"
    lines = []
    for done in (python(example, cwd=tmp_path), torchrun(2, example, cwd=tmp_path)):
        assert done.returncode == 0, done.stderr
        lines.append(done.stdout.splitlines()[-1])
    assert lines[0] == lines[1]
    assert lines[0].startswith("top-1 9") or lines[0].startswith("top-1 100")


def test_a_reader_that_leaves_ends_nothing(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = "-m", "firecaffe", "train", recipe, "--nproc-per-node", "2", "--run.folder", run
    with Typed(*command) as typed:
        typed.stdout.close()
        _, errors = typed.communicate()
        assert typed.wait() == 0, errors
    (line,) = errors.splitlines()
    assert "stdout" in line
    assert "Broken pipe" in line
    assert result_of(run)["lost_output"] == {"stdout": "Broken pipe"}


def test_a_closed_terminal_stops_a_run_with_a_checkpoint(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = "--run.folder", run, "--train.steps", "1000000", "--nproc-per-node", "2"
    with Typed("-m", "firecaffe", "train", recipe, *words) as typed:
        while not (run / "metrics.jsonl").is_file() or not (run / "metrics.jsonl").stat().st_size:
            assert psutil.Process(typed.pid).status() != psutil.STATUS_ZOMBIE
        for _ in range(2):  # a shell passes its own on
            os.kill(typed.pid, signal.SIGHUP)
        typed.stdout.close()
        _, errors = typed.communicate()
        assert typed.wait() == 75, errors
    assert "SIGHUP" in errors
    assert (run / "checkpoints" / "latest").is_file()


INTERRUPTED = """
import sys, threading
from firecaffe import cli

class Group:
    def __del__(self):
        threading.Event().wait()

def command(words):
    group = Group()
    raise KeyboardInterrupt

cli.function_of = lambda *_: command
sys.exit(cli.main(["schedule"]))
"""


def test_an_interrupted_rank_ends_before_its_groups_wait_for_others() -> None:
    assert python("-c", INTERRUPTED, environment={"RANK": "0"}).returncode == 130
