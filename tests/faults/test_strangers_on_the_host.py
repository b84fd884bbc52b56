"""A stranger on the host connects before the ranks do: they meet all the same, without it."""

import errno
import os
import socket
import stat
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.group import Group
from firecaffe.cluster.world import join
from firecaffe.transport import local_ranks
from firecaffe.transport.local_ranks import (
    NUMBER,
    TOKEN_BYTES,
    hello,
    listening,
    meet_local_ranks,
    reach,
    who_says,
)
from tests.world import Ranks, fork_server

WAIT_S = 300.0
NOBODY = 65534


def meet_beside(says: str) -> tuple[list[float], bytes, list[str]]:
    """The sums that ranks put into shared memory, what came to a stranger, what lies in TMPDIR."""
    strangers: list[socket.socket] = []

    def connects_first(world: Group, text: str) -> list[str]:
        places = [*Path(tempfile.gettempdir()).iterdir()]
        if places and not strangers:  # ranks also gather how many of them share a host, before
            place = places[0]
            strangers.append(reach(str(place), WAIT_S))
            strangers[0].send(NUMBER.pack(1) if says else b"")
            if not says:
                strangers.append(reach(str(place), WAIT_S))  # says nothing at all
        return gather_text(world, text)

    with (
        join("cpu") as world,
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="a" * 150) as folder,
    ):
        patch.setattr(tempfile, "tempdir", folder)
        patch.setattr(local_ranks, "gather_text", connects_first)
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

    def elsewhere(world: Group, text: str) -> list[str]:
        told = gather_text(world, text)
        return [each.replace("firecaffe-", "gone-") for each in told] if is_blind else told

    with join("cpu") as world, pytest.MonkeyPatch.context() as patch:
        is_blind = world.rank == blind
        with tempfile.TemporaryDirectory() as folder:
            patch.setattr(tempfile, "tempdir", folder)
            patch.setattr(local_ranks, "gather_text", elsewhere)
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
                assert who_says(comer, {1: said}) is None
        stranger.join(WAIT_S)
        assert stranger.exitcode == code
