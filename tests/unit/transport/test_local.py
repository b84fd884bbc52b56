"""What ranks of one host share: sockets at which strangers are sent away."""

import os
import socket
from pathlib import Path

import pytest

from firecaffe.transport.local_ranks import (
    NUMBER,
    TOKEN_BYTES,
    admit,
    check_answer,
    hello,
    listening,
    reach,
)

TOKENS = [NUMBER.pack(number) * (TOKEN_BYTES // 4) for number in range(1000)]
WAIT_S = 60.0
STRANGERS = {
    "a rank's number": NUMBER.pack(300),
    "its number in a byte": b"\1",
    "an empty packet": b"",
    "a number that nobody has": hello(7, TOKENS[7]),
    "another's token": hello(300, TOKENS[1]),
    "too much": hello(300, TOKENS[300]) + b"x",
    "nothing": None,
}


def expected(*numbers: int) -> dict[int, bytes]:
    return {number: hello(number, TOKENS[number]) for number in numbers}


@pytest.mark.parametrize("says", STRANGERS)
def test_a_stranger_who_comes_first_is_sent_away(tmp_path: Path, says: str) -> None:
    """Rank 300 has a number that no byte holds."""
    said = STRANGERS[says]
    with listening(str(tmp_path)) as listener, reach(str(tmp_path), WAIT_S) as stranger:
        if said is not None:
            reading, writing = os.pipe()
            socket.send_fds(stranger, [said], [writing])  # goes nowhere
            os.close(writing)
        with reach(str(tmp_path), WAIT_S) as rank:
            rank.send(hello(300, TOKENS[300]))
            [(number, let)] = admit(listener, expected(300), WAIT_S)
            with let:
                assert number == 300
                let.send(b"for the rank alone")
                assert rank.recv(100) == b"for the rank alone"
        assert not closed_by_other(stranger)
        if said is not None:
            os.set_blocking(reading, True)
            assert os.read(reading, 1) == b""  # nobody has the other end
            os.close(reading)


def closed_by_other(peer: socket.socket) -> bytes:
    """What still came; empty once the other side has closed."""
    try:
        return peer.recv(100)
    except ConnectionResetError:  # with what was not read
        return b""


def test_a_rank_is_let_in_once(tmp_path: Path) -> None:
    with listening(str(tmp_path)) as listener:
        peers = [reach(str(tmp_path), WAIT_S) for _ in range(3)]
        for peer, number in zip(peers, (1, 1, 2), strict=True):
            peer.send(hello(number, TOKENS[number]))
        came = dict(admit(listener, expected(1, 2), WAIT_S))
        assert sorted(came) == [1, 2]
        assert closed_by_other(peers[1]) == b""
        for each in [*came.values(), *peers]:
            each.close()


def test_who_waits_in_vain_says_for_whom(tmp_path: Path) -> None:
    with (
        listening(str(tmp_path)) as listener,
        reach(str(tmp_path), WAIT_S),
        pytest.raises(TimeoutError, match="local rank 1, 2 did not come in"),
    ):
        list(admit(listener, expected(1, 2), 0.01))


def test_what_listens_has_to_be_the_rank(tmp_path: Path) -> None:
    with listening(str(tmp_path)) as listener, reach(str(tmp_path), WAIT_S) as peer:
        other, _ = listener.accept()
        with other:
            other.send(hello(0, TOKENS[1]))
            with pytest.raises(ConnectionError, match="no rank of this run"):
                check_answer(peer, hello(0, TOKENS[0]))
