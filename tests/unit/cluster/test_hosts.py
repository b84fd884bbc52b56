"""Addresses of both kinds, hosts that meet, where, and what is said while they do; who reaches the
stores that ranks hold for each other; rank 0's door, and who comes to it.
"""

import json
import os
import pickle
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import psutil
import pytest
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    RendezvousSettings,
    RendezvousTimeout,
    _NodeDesc,
    _RendezvousState,
)

from firecaffe.cluster import addresses, agent, groups, hosts, joining, launcher
from firecaffe.cluster.addresses import (
    LOOPBACK,
    check_reachable,
    is_here,
    is_loopback_only,
    join_place,
    listen,
    own_addresses,
    split_place,
)
from firecaffe.cluster.calls import SideThread
from firecaffe.cluster.groups import ATTEMPTS, _own_store, choose_interface, meeting
from firecaffe.cluster.hosts import (
    Hosts,
    OwnClockState,
    check_hosts_options,
    own_address,
    wait_for_endpoint,
)
from firecaffe.cluster.joining import JoinClient, JoinRequest, JoinServer, _invitation, door_key
from firecaffe.cluster.launcher import _Launch
from firecaffe.cluster.secret import SECRET
from firecaffe.errors import LaunchError, RecipeError
from tests.loopback import free_port, has_ipv6

PLACES = {
    "node-a.example:29400": ("node-a.example", 29400),
    "192.0.2.1:1": ("192.0.2.1", 1),
    "[2001:db8::1]:65535": ("2001:db8::1", 65535),
    "[fe80::1%eth0]:29400": ("fe80::1%eth0", 29400),
}
NO_HOST = ["", "node", ":29400", "[]:1", "a b:1", "[a]b:1", "[::1]", "::1:29400"]
NO_PORT = ["node:", "node:0", "node:65536", "node:port", "[::1]29400"]


def test_a_place_is_taken_apart_and_put_together() -> None:
    for text, place in PLACES.items():
        assert (split_place(text), join_place(*place)) == (place, text)
    for text in (*NO_HOST, *NO_PORT):
        with pytest.raises(ValueError, match="HOST:PORT"):
            split_place(text)


def interfaces(*addresses: str) -> dict[str, list[SimpleNamespace]]:
    """As psutil tells them, which adds the interface to an address of one link alone."""
    families = [socket.AF_INET6 if ":" in each else socket.AF_INET for each in addresses]
    pairs = zip(families, addresses, strict=True)
    return {"eth0": [SimpleNamespace(family=family, address=each) for family, each in pairs]}


def test_what_a_host_tells_others_and_whose_an_address_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for has, tells in (
        (["127.0.0.1", "::1", "192.0.2.1", "2001:db8::1"], ["192.0.2.1", "2001:db8::1"]),
        (["::1", "2001:db8::1", "fe80::1%eth0"], ["2001:db8::1"]),
        (["127.0.0.1", "::1"], [LOOPBACK]),
    ):
        monkeypatch.setattr(psutil, "net_if_addrs", partial(interfaces, *has))
        assert own_addresses(LOOPBACK) == tells
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces("192.0.2.1", "2001:db8::1"))
    assert is_here("2001:db8::1")
    assert not is_here("2001:db8::2")
    assert not is_here("no host has spaces")


def names_lead_to(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every name leads there, as the host's own does to 127.0.1.1 on Debian."""
    found = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (address, 9))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)


def test_a_hosts_own_name_may_lead_to_its_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces(LOOPBACK, "192.0.2.1"))
    names_lead_to("127.0.1.1", monkeypatch)
    assert is_here("node-a")
    assert is_loopback_only("node-a")
    check_reachable("node-a", "")  # the only interface it can be
    names_lead_to("192.0.2.9", monkeypatch)
    assert not is_here("node-a")
    assert not is_loopback_only("node-a")


def test_a_name_that_leads_to_none_of_several_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    several = {"eth0": interfaces("192.0.2.1")["eth0"], "docker0": interfaces("172.17.0.1")["eth0"]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: several)
    names_lead_to("127.0.1.1", monkeypatch)
    with pytest.raises(LaunchError, match=r"node-a is 127\.0\.1\.1 .*192\.0\.2\.1.*; say which"):
        check_reachable("node-a", "say which")
    check_reachable("localhost", "")  # all of them on this host
    names_lead_to("192.0.2.9", monkeypatch)
    check_reachable("node-a", "")


def test_a_listener_is_called_by_both_kinds() -> None:
    with listen(one_host=False) as listener:
        port = listener.getsockname()[1]
        for host in (LOOPBACK, "::1") if has_ipv6() else (LOOPBACK,):
            with socket.create_connection((host, port)), listener.accept()[0]:
                pass


def two(place: str) -> Hosts:
    return Hosts(1, 2, 2, place, "a run")


def launch_at(hosts: Hosts, address: str, folder: Path) -> _Launch:
    secret = b"of all in this file"
    return _Launch([], hosts, 0, address, secret, folder, "", lambda *_: _[1], SideThread())


def test_where_hosts_may_meet() -> None:
    check_hosts_options(two("[::1]:29400"))
    check_hosts_options(two("localhost:29400"))
    with pytest.raises(RecipeError, match="::1:29400"):
        check_hosts_options(two("::1:29400"))
    with pytest.raises(RecipeError, match="--rdzv-endpoint is missing"):
        check_hosts_options(two(""))


NOWHERE = "nowhere.invalid"
"""RFC 6761: never resolves."""


def test_a_name_that_nobody_knows_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", NOWHERE)
    monkeypatch.setenv("MASTER_PORT", "29400")
    with pytest.raises(LaunchError, match=f"MASTER_ADDR names '{NOWHERE}'"), meeting(2):
        pass


def test_the_endpoints_name_may_become_known_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod's is known once it is placed, which may be after the others have started."""
    errors, look_up = iter([socket.gaierror(-2, "Name or service not known")]), socket.getaddrinfo

    def look_up_later(_: str, *rest: Any, **more: Any) -> Any:
        for error in errors:
            raise error
        return look_up(LOOPBACK, *rest, **more)

    monkeypatch.setattr(addresses, "FIRST_S", 0.01)
    monkeypatch.setattr(socket, "getaddrinfo", look_up_later)
    place = "pod-0.job:29400"
    check_hosts_options(two(place))
    assert own_address(two(place)) in own_addresses(LOOPBACK)
    assert not list(errors)


def test_who_listens_where_hosts_meet() -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        place = join_place(*server.getsockname())
        assert not wait_for_endpoint(two(place))
    assert wait_for_endpoint(two(place))


def test_who_does_not_come_is_waited_for_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launcher, also one whose host is not known; and rank 0, by a rank of another host."""
    place = join_place(LOOPBACK, free_port())
    monkeypatch.setattr(hosts, "is_here", lambda _: False)
    monkeypatch.setattr(groups, "is_alone", lambda _: False)
    monkeypatch.setattr(addresses, "SAY_EVERY_S", 0.0)
    monkeypatch.setattr(addresses, "FIRST_S", 0.01)
    monkeypatch.setattr(hosts, "PATIENCE_S", 0.05)
    patience, (host, port) = timedelta(seconds=0.05), place.split(":")
    for wait, where, advice in (
        (partial(wait_for_endpoint, two(place)), place, "start one"),
        (partial(wait_for_endpoint, two(f"{NOWHERE}:29400")), NOWHERE, "start one"),
        (partial(groups._store.__wrapped__, (host, port), 1, 2, patience), place, "firewall"),
    ):
        with pytest.raises(LaunchError, match=f"{where}.*{advice}"):
            wait()
        lines = capsys.readouterr().err.splitlines()
        assert lines
        assert all(where in line for line in lines)


def test_who_is_there_is_said_until_all_are_or_time_is_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A host alone waits for nobody: its own ranks may take a while to meet."""
    monkeypatch.setattr(agent, "SAY_EVERY_S", 0.1)
    for each in (launcher, hosts):
        monkeypatch.setattr(each, "PATIENCE_S", 2.0)
    place = join_place(LOOPBACK, free_port())
    with pytest.raises(LaunchError, match=r"1 of 2 hosts came in 2 s.*a run: 192\.0\.2\.1"):
        launch_at(two(place), "192.0.2.1", tmp_path).run()
    lines = capsys.readouterr().err.splitlines()
    (*_, line) = (line for line in lines if "1 of 2 there (192.0.2.1)" in line)
    for said in (place, "--rdzv-id a run", "of 2 s"):
        assert said in line
    alone = launch_at(Hosts(2), LOOPBACK, tmp_path)
    alone.on_waiting(10.0)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(alone, "_there", lambda: ["node-a", "node-b"])
    alone.hosts = two(place)
    alone.on_waiting(10.0)
    assert "a host to leave" in capsys.readouterr().err
    alone.met.shutdown()


def test_a_store_is_of_one_run(tmp_path: Path) -> None:
    """Another would go on from the first one's folder. Both know the secret."""
    place = join_place(LOOPBACK, free_port())
    first = launch_at(two(place), "192.0.2.1", tmp_path)
    launch_at(two(place), "192.0.2.2", tmp_path)
    other = replace(two(place), rdzv_id="another run")
    with pytest.raises(LaunchError, match=f"{place}.*a run .*another run"):
        launch_at(other, "192.0.2.2", tmp_path)
    first.met.shutdown()


GLOO = "GLOO_SOCKET_IFNAME"


def test_gloo_is_told_where_others_find_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would tell them the loopback address that this host's own name leads to."""
    monkeypatch.setattr(groups, "own_addresses", lambda _: ["192.0.2.2"])
    monkeypatch.setattr(groups, "interface_of", {"192.0.2.2": "eth7", LOOPBACK: "lo"}.get)
    for leads_inward, master, local, chosen in (
        (True, "192.0.2.1", "1", "eth7"),
        (False, "192.0.2.1", "1", None),
        (True, LOOPBACK, "1", "lo"),
        (True, "192.0.2.1", "2", "lo"),
    ):
        with monkeypatch.context() as patched:
            patched.setenv(GLOO, "")
            patched.delenv(GLOO)
            patched.setenv("MASTER_ADDR", master)
            patched.setenv("LOCAL_WORLD_SIZE", local)
            own = {socket.gethostname(): leads_inward}
            patched.setattr(groups, "is_loopback_only", lambda name, own=own: own.get(name, False))
            choose_interface(2)
            assert os.environ.get(GLOO) == chosen


TIMEOUT = timedelta(seconds=300)


def listens_at(store: TCPStore) -> set[str]:
    places = psutil.Process(os.getpid()).net_connections("inet")
    listening = (each.laddr for each in places if each.status == psutil.CONN_LISTEN)
    return {each.ip for each in listening if each.port == store.port}


@pytest.mark.parametrize("host", [LOOPBACK, "localhost", "a-name.invalid"])
def test_ranks_of_one_host_meet_at_its_loopback(host: str) -> None:
    store = _own_store(host, 0, 0, True, TIMEOUT)
    assert listens_at(store) <= {LOOPBACK, "::1"}
    other = _own_store(host, store.port, 1, True, TIMEOUT)
    store.set("key", "value")
    assert other.get("key") == b"value"
    # As a script that initializes torch.distributed by itself has it, in the process of rank 0.
    again = _own_store(host, store.port, 0, True, TIMEOUT)
    assert again.get("key") == b"value"


def test_ranks_of_several_hosts_are_reached_from_all() -> None:
    store = _own_store(LOOPBACK, 0, 0, False, TIMEOUT)
    assert listens_at(store) <= {"::", "0.0.0.0"}


LONG_S = 300.0


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def server(store: TCPStore) -> JoinServer:
    attempt = store.add(ATTEMPTS, 1) - 1
    own = TCPStore("127.0.0.1", store.port, is_master=False)
    server = JoinServer(own, attempt, one_host=True)
    server.open({"learners": 2})
    own.get(door_key(attempt))  # answered, so that others see it too
    return server


def who_asks(server: JoinServer) -> JoinRequest:
    """What one client of a store sets, another may see a little later."""
    while (comer := server.next()) is None:
        pass
    return comer


def ask(store: TCPStore, number: int, text: str) -> None:
    store.set(f"firecaffe/comer/0/{number}", text)


def test_a_worker_that_comes_meets_rank_0(store: TCPStore, server: JoinServer) -> None:
    comes = JoinClient(f"127.0.0.1:{store.port}", LONG_S)
    assert comes.facts == {"learners": 2}
    with ThreadPoolExecutor() as threads:
        entering = threads.submit(comes.enter, {"doubt": ""})
        comer = who_asks(server)
        ours = server.admit(comer, 3, ["a", "b", "c"])
        place = entering.result(LONG_S)
    with ours, place.socket as its:
        assert (place.rank, place.hosts) == (3, ["a", "b", "c", socket.gethostname()])
        ours.sendall(b"x")
        assert its.recv(1) == b"x"


def test_who_asks_and_never_calls_is_not_waited_for(store: TCPStore, server: JoinServer) -> None:
    ask(store, 0, json.dumps({"host": "silent"}))
    comer = who_asks(server)
    with (
        patch.object(joining, "COME_S", 0.05),
        pytest.raises(LaunchError, match="rank 1 did not call in time"),
    ):
        server.admit(comer, 1, ["here"])


def test_who_asks_for_something_else_is_passed_over(store: TCPStore, server: JoinServer) -> None:
    nonsense = ["no JSON", "{}", '["host"]']
    for number, text in enumerate([*nonsense, json.dumps({"host": "next"})]):
        ask(store, number, text)
    for _ in nonsense:
        with pytest.raises(LaunchError, match="somebody asked to come with"):
            who_asks(server)
    comer = who_asks(server)
    assert (comer.number, comer.host) == (3, "next")


def test_who_is_invited_reads_that_a_file_of_the_secret_joins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SECRET, "s" * 16)
    assert "--secret-file FILE joins this run" in _invitation("firecaffe train")
    monkeypatch.delenv(SECRET)
    assert "can join" in _invitation("firecaffe train")


def test_torch_prints_nothing_where_no_run_answers(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RecipeError, match="--join: 'nonsense' is not HOST:PORT"):
        JoinClient("nonsense", LONG_S)
    place = f"127.0.0.1:{free_port()}"
    with (
        patch.object(joining, "ANSWER_S", 0.1),
        pytest.raises(LaunchError, match=f"--join {place}: no run answers there: .*refused"),
    ):
        JoinClient(place, LONG_S)
    assert capfd.readouterr().err == ""


def test_a_host_whose_clock_is_behind_is_there_while_it_gives_signs_of_life() -> None:
    behind_s, now_s = 3600.0, 1000.0
    state, late = _RendezvousState(), _NodeDesc("late", 1, 0)

    def reads(holder: OwnClockState) -> list[_NodeDesc]:
        """The hosts that are there at `now_s`."""
        with patch.object(time, "monotonic", lambda: now_s):
            holder.sync()
        return list(holder.state.last_heartbeats)

    def gives_sign() -> None:
        state.last_heartbeats[late] = datetime.now(UTC) - timedelta(seconds=behind_s - now_s)

    settings = RendezvousSettings("run", 1, 2, RendezvousTimeout(), timedelta(seconds=2), 3)
    backend = SimpleNamespace(get_state=lambda: (pickle.dumps(state), None))
    holder = OwnClockState(cast(RendezvousBackend, backend), settings)
    for _ in range(3):
        gives_sign()
        now_s += 5
        assert reads(holder) == [late]
    written = holder.state.last_heartbeats[late]
    assert written == state.last_heartbeats[late], "others read what it wrote"
    now_s += 10
    assert reads(holder) == []
