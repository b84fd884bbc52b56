"""Hosts that meet: where, and what is said while they do."""

import os
import socket
import threading
from pathlib import Path
from unittest.mock import patch

import pytest

from firecaffe.cluster import agent, groups, hosts, launch, rendezvous
from firecaffe.cluster.addresses import LOOPBACK, join_place
from firecaffe.cluster.groups import choose_interface, meeting
from firecaffe.cluster.hosts import Hosts, check_hosts_words, wait_for_endpoint
from firecaffe.cluster.interruptible import Aside
from firecaffe.cluster.launch import _Launch
from firecaffe.errors import LaunchError, RecipeError


def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as server:
        return int(server.getsockname()[1])


def two(place: str) -> Hosts:
    return Hosts(1, 2, 2, place, "a run")


def launch_at(hosts: Hosts, address: str, folder: Path) -> _Launch:
    secret = b"of all in this file"
    return _Launch([], hosts, 0, address, secret, str(folder), "", lambda *_: _[1], Aside())


def test_where_hosts_may_meet() -> None:
    check_hosts_words(two("[::1]:29400"))
    check_hosts_words(two("localhost:29400"))
    with pytest.raises(RecipeError, match="::1:29400"):
        check_hosts_words(two("::1:29400"))
    with pytest.raises(RecipeError, match="--rdzv-endpoint is missing"):
        check_hosts_words(two(""))


def test_a_name_that_nobody_knows_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = "nowhere.invalid"  # RFC 6761: never resolves
    with pytest.raises(LaunchError, match=f"--rdzv-endpoint {nowhere}:29400"):
        check_hosts_words(two(f"{nowhere}:29400"))
    monkeypatch.setenv("MASTER_ADDR", nowhere)
    monkeypatch.setenv("MASTER_PORT", "29400")
    with pytest.raises(LaunchError, match=f"MASTER_ADDR names '{nowhere}'"), meeting(2):
        pass


def test_who_listens_where_hosts_meet() -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        place = join_place(*server.getsockname())
        assert not wait_for_endpoint(two(place))
    assert wait_for_endpoint(two(place))


def test_a_host_that_does_not_come_is_waited_for_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = join_place(LOOPBACK, free_port())
    monkeypatch.setattr(hosts, "is_here", lambda _: False)
    monkeypatch.setattr(hosts, "SAY_EVERY_S", 0.0)
    monkeypatch.setattr(hosts, "TRY_S", 0.01)
    monkeypatch.setattr(hosts, "PATIENCE_S", 0.05)
    with pytest.raises(LaunchError, match=place):
        wait_for_endpoint(two(place))
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(place in line for line in lines)


@patch.dict(os.environ)  # where a launcher names the attempt for its ranks
def test_who_is_there_is_said_until_all_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(agent, "SAY_EVERY_S", 0.01)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # as `launch` does
    place = join_place(LOOPBACK, free_port())
    waits = threading.Event()
    launches = []
    for name in ("192.0.2.1", "192.0.2.2"):
        (tmp_path / name).mkdir()
        launches.append(launch_at(two(place), name, tmp_path / name))
    first, second = launches
    tell = first.on_waiting

    def tell_once_there(waited_s: float) -> None:
        if first.met._state_holder.state.participants:
            tell(waited_s)
            waits.set()

    monkeypatch.setattr(first, "on_waiting", tell_once_there)
    groups = [each.agent.get_worker_group() for each in launches]
    thread = threading.Thread(target=first.agent._rendezvous, args=(groups[0],))
    thread.start()
    assert waits.wait(300)
    second.agent._rendezvous(groups[1])
    thread.join()
    assert {group.group_rank for group in groups} == {0, 1}
    line = capsys.readouterr().err.splitlines()[0]
    assert place in line
    assert "--rdzv-id a run" in line
    assert "of 600 s" in line
    assert "1 of 2 there (192.0.2.1)" in line
    for each in launches:
        each.handler.shutdown()


def test_who_came_is_said_if_not_all_did(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for each in (launch, rendezvous):
        monkeypatch.setattr(each, "PATIENCE_S", 1.0)
    place = join_place(LOOPBACK, free_port())
    with pytest.raises(LaunchError, match=r"1 of 2 hosts came in 1 s.*a run: 192\.0\.2\.1"):
        launch_at(two(place), "192.0.2.1", tmp_path).run()


GLOO = "GLOO_SOCKET_IFNAME"


@pytest.mark.parametrize(
    ("name_leads_inward", "master", "local", "chosen"),
    [
        (True, "192.0.2.1", "1", "eth7"),
        (False, "192.0.2.1", "1", None),
        (True, LOOPBACK, "1", "lo"),
        (True, "192.0.2.1", "2", "lo"),
    ],
)
def test_gloo_is_told_where_others_find_it(
    monkeypatch: pytest.MonkeyPatch,
    name_leads_inward: bool,
    master: str,
    local: str,
    chosen: str | None,
) -> None:
    """Else it would tell them the loopback address that this host's own name leads to."""
    monkeypatch.setenv(GLOO, "")
    monkeypatch.delenv(GLOO)
    monkeypatch.setenv("MASTER_ADDR", master)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    own = {socket.gethostname(): name_leads_inward}
    monkeypatch.setattr(groups, "is_inward", lambda name: own.get(name, False))
    monkeypatch.setattr(groups, "own_addresses", lambda _: ["192.0.2.2"])
    monkeypatch.setattr(groups, "interface_of", {"192.0.2.2": "eth7", LOOPBACK: "lo"}.get)
    choose_interface(2)
    assert os.environ.get(GLOO) == chosen


def test_a_host_alone_waits_for_nobody(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Its own ranks may take a while to meet, and that is no host's fault."""
    alone = launch_at(Hosts(2), LOOPBACK, tmp_path)
    alone.on_waiting(10.0)
    assert capsys.readouterr().err == ""
    alone.handler.shutdown()
