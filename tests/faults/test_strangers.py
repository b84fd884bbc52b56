"""Strangers reach the sockets of a run: another user of the host, or a host without the secret. One
that connects before the ranks do is sent away: they meet all the same, without it.
"""

import errno
import os
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ipaddress import ip_address
from pathlib import Path
from select import POLLIN, poll
from typing import Any

import psutil
import pytest
import torch

from benchmarks.kit.small_run import command
from firecaffe.cluster.agree import gather_json
from firecaffe.cluster.group import Group
from firecaffe.cluster.secret import SECRET
from firecaffe.cluster.world import join
from firecaffe.errors import LaunchError
from firecaffe.training.plugins import VARIABLE as PLUGINS
from firecaffe.transport import local_ranks
from firecaffe.transport.local_ranks import (
    NUMBER,
    TOKEN_BYTES,
    hello,
    identify_peer,
    listening,
    meet_local_ranks,
    reach,
)
from tests.faults import held
from tests.faults.runs import meeting, read, write_recipe
from tests.loopback import free_port
from tests.typed import Typed, python
from tests.world import Ranks, fork_server

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
    return write_recipe(tmp_path)


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
    assert read(folder / "result.json")["steps"] == STEPS


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
    words = meeting(free_port(), "a run")
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


WAIT_S = 300.0
NOBODY = 65534


def meet_beside(says: str) -> tuple[list[float], bytes, list[str]]:
    """The sums that ranks put into shared memory, what came to a stranger, what lies in TMPDIR."""
    strangers: list[socket.socket] = []

    def connects_first(world: Group, value: Any) -> list[Any]:
        if not strangers:
            (place, *_) = Path(tempfile.gettempdir()).iterdir()
            strangers.append(reach(str(place), WAIT_S))
            strangers[0].send(NUMBER.pack(1) if says else b"")
            if not says:
                strangers.append(reach(str(place), WAIT_S))  # says nothing at all
        return gather_json(world, value)

    with (
        join("cpu") as world,
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="a" * 150) as folder,
    ):
        patch.setattr(tempfile, "tempdir", folder)
        patch.setattr(local_ranks, "gather_json", connects_first)
        local = meet_local_ranks(world, WAIT_S)
        assert local is not None
        vectors = local.share(3, torch.float32)
        vectors[local.own].fill_(1.0 + world.rank)
        local.barrier()
        found = [float(each.sum()) for each in vectors]
        local.barrier()
        local.close()
        came = b""
        for each in strangers:
            with each:
                try:
                    data, descriptors, _, _ = socket.recv_fds(each, 100, 10)
                    came += data + bytes(descriptors)
                except ConnectionResetError:
                    pass
        return found, came, os.listdir(folder)


@pytest.mark.parametrize("says", ["a number", ""])
def test_ranks_meet_beside_a_stranger(ranks: Ranks, says: str) -> None:
    """TMPDIR is longer than an address of a socket may be."""
    assert ranks.shared(3, meet_beside, says) == [([3.0, 6.0, 9.0], b"", [])] * 3


def meet_apart(blind: int) -> tuple[bool, list[str]]:
    """Whether ranks meet if one does not see the others' folders, as in a container of its own."""

    def elsewhere(world: Group, value: Any) -> list[Any]:
        told = gather_json(world, value)
        if is_blind:
            return [[folder.replace("firecaffe-", "gone-"), token] for folder, token in told]
        return told

    with join("cpu") as world, pytest.MonkeyPatch.context() as patch:
        is_blind = world.rank == blind
        with tempfile.TemporaryDirectory() as folder:
            patch.setattr(tempfile, "tempdir", folder)
            patch.setattr(local_ranks, "gather_json", elsewhere)
            return meet_local_ranks(world, WAIT_S) is not None, os.listdir(folder)


def test_ranks_that_do_not_see_each_other_share_no_memory(ranks: Ranks) -> None:
    assert ranks.shared(3, meet_apart, 2) == [(False, [])] * 3


def connect_as_nobody(place: str, said: bytes) -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        try:
            peer.connect(place)
        except PermissionError as error:
            sys.exit(error.errno)
        peer.send(said)
        assert not peer.recv(100)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize(
    ("mode", "code"), [(0o700, errno.EACCES), (0o777, 0)], ids=["shut", "open"]
)
def test_another_user_is_sent_away(mode: int, code: int) -> None:
    """Even one who knows what the rank will say, and whom the folder does not keep out."""
    said = hello(1, bytes(TOKEN_BYTES))
    with tempfile.TemporaryDirectory() as folder, listening(folder) as listener:
        place = Path(folder) / local_ranks.NAME
        place.chmod(0o777)
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        Path(folder).chmod(mode)
        stranger = fork_server().Process(target=connect_as_nobody, args=(str(place), said))
        stranger.start()
        if code == 0:
            listener.settimeout(WAIT_S)
            comer, _ = listener.accept()
            with comer:
                comer.settimeout(WAIT_S)
                assert identify_peer(comer, {1: said}) is None
        stranger.join(WAIT_S)
        assert stranger.exitcode == code
