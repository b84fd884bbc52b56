"""Strangers reach the sockets of a run: another user of the host, or a host without the secret."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ipaddress import ip_address
from pathlib import Path
from select import POLLIN, poll

import psutil
import pytest

from benchmarks.kit.small_run import RECIPE, command
from firecaffe.cluster.secret import SECRET
from firecaffe.errors import LaunchError
from firecaffe.training.plugins import VARIABLE as PLUGINS
from tests.faults import held
from tests.typed import Typed, python

STEPS = 4

ATTACK = """
import base64, os, pickle, sys
from torch.distributed import TCPStore

class Payload:
    def __reduce__(self):
        return os.mkdir, (sys.argv[2],)

if os.geteuid() == 0:  # another user, who is nobody
    os.setgroups([])
    os.setuid(65534)
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
for key in store.list_keys():
    if key.startswith("torch.rendezvous"):
        store.set(key, base64.b64encode(pickle.dumps(Payload())))
        print(key)
store.set("firecaffe/run_folder/0", sys.argv[2])
"""
"""Writes into a launcher's store what makes a folder if it is unpickled."""

FEW = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0}))
runpy.run_module("firecaffe", run_name="__main__", alter_sys=True)
"""
"""The command with so many descriptors."""

DESCRIPTORS = 128
FULL = DESCRIPTORS - 2
"""A process that has so many of them has none left, but for those that come and go."""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


@contextmanager
def held_run(recipe: Path, *python_words: str) -> Iterator[tuple[Typed, Path]]:
    """(a run of two ranks that goes on when the file is there, the file)."""
    file, run = recipe.parent / "go on", recipe.parent / "run"
    hold = {held.STEP: "2", held.FILE: str(file), PLUGINS: held.__name__}
    words = command(recipe, run, 2, "--train.steps", str(STEPS))[3:]
    with Typed(*(python_words or ("-m", "firecaffe")), *words, environment=hold) as training:
        for line in training.stdout:
            if "training and" in line:  # the ranks have met
                break
        yield training, file


def listeners(pid: int) -> dict[int, set[tuple[str, int]]]:
    """(address, port) at which a process and its children listen, by process."""
    launcher = psutil.Process(pid)
    return {
        each.pid: {
            (one.laddr.ip, one.laddr.port)
            for one in each.net_connections("inet")
            if one.status == psutil.CONN_LISTEN
        }
        for each in (launcher, *launcher.children(recursive=True))
        if each.status() != psutil.STATUS_ZOMBIE  # which root alone may look into
    }


def check_done(run: Typed, folder: Path) -> None:
    """That the run has trained to its end, as if nobody had come."""
    _, errors = run.communicate()
    assert run.wait() == 0, errors
    assert "firecaffe: " not in errors
    assert json.loads((folder / "result.json").read_text())["steps"] == STEPS


def test_a_run_of_one_host_listens_there_alone_and_unpickles_nothing_of_others(
    recipe: Path, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    tmp_path.chmod(0o777)  # the stranger may write here; only the run's store is in the way
    with held_run(recipe) as (run, file):
        found = listeners(run.pid)
        places = set().union(*found.values())
        assert places
        assert all(ip_address(address).is_loopback for address, _ in places)
        ((_, port),) = found[run.pid]
        attack = python("-c", ATTACK, port, made)
        assert attack.returncode == 0, attack.stderr
        assert "torch.rendezvous" in attack.stdout
        file.touch()
        check_done(run, tmp_path / "run")
    assert not made.exists()


def test_many_that_connect_and_say_nothing_do_not_stop_a_launcher(
    recipe: Path, tmp_path: Path
) -> None:
    with held_run(recipe, "-c", FEW.format(DESCRIPTORS)) as (run, file), ExitStack() as strangers:
        ((_, port),) = listeners(run.pid)[run.pid]
        sockets = [
            strangers.enter_context(socket.create_connection(("127.0.0.1", port)))
            for _ in range(300)
        ]
        launcher, said = psutil.Process(run.pid), poll()
        for each in sockets:
            said.register(each, POLLIN)
        while launcher.num_fds() < FULL and not said.poll(0):
            pass  # they have not been taken up yet, and none was cut off
        file.touch()
        check_done(run, tmp_path / "run")


def test_a_host_with_another_secret_is_told_and_ends_nobody_else(
    recipe: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    words = ["--nnodes", "2", "--rdzv-endpoint", place, "--rdzv-id", "a run"]
    training = command(recipe, tmp_path / "run", 1, "--train.steps", str(STEPS), *words)[1:]

    def host(secret: str) -> Typed:
        return Typed(*training, environment={SECRET: secret})

    with host("the secret of this run") as first:
        while not listeners(first.pid)[first.pid]:
            assert psutil.pid_exists(first.pid)
        with host("the secret of another run") as other:
            _, errors = other.communicate()
            assert other.wait() == LaunchError.exit_code, errors
            (line,) = errors.splitlines()
            assert "somebody with another secret, or none" in line
            assert "--secret-file" in line
        with host("the secret of this run") as second:
            said = [first.communicate(), second.communicate()]
            assert [first.wait(), second.wait()] == [0, 0], said
