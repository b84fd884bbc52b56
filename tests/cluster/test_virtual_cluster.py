"""The emulated cluster: its links keep their rate, its ranks find each other, nothing is left."""

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.emulated.cluster_run import RankFailedError, RunTimeoutError
from benchmarks.emulated.namespaces import (
    FOLDER,
    ClusterError,
    ClusterUnavailableError,
    new_prefix,
    remove_leftovers,
)
from benchmarks.emulated.virtual_cluster import VirtualCluster, main

Up = Callable[..., VirtualCluster]

ROOT = Path(__file__).parents[2]
RATE = 100_000_000
SIZE = 2_000_000
WAIT_S = 300.0
"""For what comes at once, unless it never comes."""

TRANSFER = """
import os, socket, sys, time
size, meeting = int(sys.argv[1]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    with socket.create_server(meeting) as server:
        senders = [server.accept()[0] for _ in range(int(os.environ["WORLD_SIZE"]) - 1)]
    begin, total = time.perf_counter(), 0
    for sender in senders:
        sender.sendall(b"!")
    for sender in senders:
        while data := sender.recv(1 << 18):
            total += len(data)
    print(total, time.perf_counter() - begin)
else:
    while True:
        try:
            connection = socket.create_connection(meeting)
            break
        except ConnectionRefusedError:  # rank 0 is not there yet
            time.sleep(0.01)
    connection.recv(1)
    connection.sendall(bytes(size))
    connection.close()
"""
"""All other ranks send to rank 0, which prints the bytes that came, and the seconds they took."""


REACH = """
import socket, sys
for address in sys.argv[2:]:
    try:
        socket.create_connection((address, int(sys.argv[1])), timeout=120).close()
        print("reached", address)
    except OSError:
        print("failed", address)
"""

# It tells of its ranks once they are what was asked for, and so have asked to die with it.
OWNER = """
import time
from pathlib import Path
from benchmarks.emulated.virtual_cluster import VirtualCluster
with VirtualCluster(2, 100_000_000) as cluster:
    ranks = cluster.start(["sleep", "600"])
    while any(Path(f"/proc/{rank.pid}/comm").read_text() != "sleep\\n" for rank in ranks):
        time.sleep(0.01)
    print(cluster.namespaces[0], *(rank.pid for rank in ranks), flush=True)
    ranks[0].wait(600)
"""


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


def transfer(cluster: VirtualCluster, size: int = SIZE) -> tuple[int, float]:
    """Bytes that came to host 0, and the seconds from the first to the last."""
    count, seconds = cluster.run(python(TRANSFER, size), timeout_s=WAIT_S).split()
    return int(count), float(seconds)


def names_like(name: str) -> list[str]:
    """All namespaces of the cluster that one namespace belongs to."""
    prefix = name.rpartition("-")[0]
    return sorted(path.name for path in FOLDER.iterdir() if path.name.startswith(f"{prefix}-"))


def all_end(pidfds: Iterable[int]) -> bool:
    """Whether processes are gone; they have time: who kills does not wait for the end."""
    ends = []
    for pidfd in pidfds:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        ends.append(bool(poll.poll(1000 * WAIT_S)))
        os.close(pidfd)
    return all(ends)


def tool(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_ranks_have_torchruns_environment(cluster: Up) -> None:
    three = cluster(3, RATE)
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK MASTER_ADDR"
    names += " GLOO_SOCKET_IFNAME OMP_NUM_THREADS MINE"
    show = "echo " + " ".join(f"${name}" for name in names.split())
    more = {"MINE": "yes", "OMP_NUM_THREADS": "2"}
    ranks = three.start(["sh", "-c", show], ranks_per_host=2, environment=more)
    assert [rank.wait(WAIT_S) for rank in ranks] == [0] * 6
    for rank, process in enumerate(ranks):
        host, local_rank = divmod(rank, 2)
        expected = f"{rank} {local_rank} 6 2 {host} {host} {three.address(0)} veth0 2 yes\n"
        assert process.stdout == expected


def test_links_keep_their_rate_and_count_what_is_sent(cluster: Up) -> None:
    pair = cluster(2, RATE)
    sent = [pair.sent_bytes(host) for host in (0, 1)]
    count, seconds = transfer(pair)
    assert count == SIZE
    assert seconds > 0.8 * 8 * SIZE / RATE
    assert SIZE < pair.sent_bytes(1) - sent[1] < 1.1 * SIZE
    assert pair.sent_bytes(0) - sent[0] < 0.1 * SIZE

    pair.set_rate(1, RATE // 4)
    assert transfer(pair, SIZE // 2)[1] > 0.8 * 8 * (SIZE // 2) / (RATE // 4)
    assert pair.conditions()["rate_bits_per_s"] == f"[{RATE}, {RATE // 4}]"


def test_conditions_are_the_kernels(cluster: Up) -> None:
    pair = cluster(2, RATE, congestion_control="reno", queue_bytes=200_000)
    said = pair.conditions()
    assert (said["hosts"], said["rate_bits_per_s"], said["burst_bytes"]) == (2, RATE, 24_576)
    assert (said["congestion_control"], said["queue_bytes"]) == ("reno", 200_000)
    assert (said["processors"], said["kernel"]) == ("shared", os.uname().release)
    settings = ["tcp_congestion_control", "tcp_slow_start_after_idle", "tcp_no_metrics_save"]
    paths = [f"/proc/sys/net/ipv4/{name}" for name in settings]
    host, switch = names_like(pair.namespaces[1])[1:]
    assert tool("ip", "netns", "exec", host, "cat", *paths) == "reno\n0\n1\n"
    for name, device in (host, "veth0"), (switch, "p0"), (switch, "p1"):
        assert "rate 100Mbit burst 24Kb" in tool("tc", "-n", name, "qdisc", "show", "dev", device)


SPIN = """
import time
while time.process_time() < 0.5:
    pass
"""


def test_a_host_has_its_share_of_the_processors_and_no_more(cluster: Up) -> None:
    """By what the kernel counts: how much it takes at once on a busy machine is its own affair."""
    pair = cluster(2, RATE, processors=[0.25, 0.2])
    group, other = (next(Path("/sys/fs/cgroup").glob(f"**/{name}")) for name in pair.namespaces[:2])
    files = [other / name for name in ("cpu.cfs_quota_us", "cpu.max")]
    (quota,) = [path.read_text().split()[0] for path in files if path.exists()]
    assert quota == "1000"
    pair.run([sys.executable, "-c", SPIN])
    counts = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
    assert int(counts["nr_throttled"]) > 0, "it was never held back"
    pair.__exit__()
    assert not group.exists()


def test_a_host_of_a_whole_processor_is_bound_to_it(cluster: Up) -> None:
    """Once it runs: the command waits for it, on that host."""
    assert cluster(1, RATE, processors=1).conditions()["burst_bytes"] == 6_144
    bound = "os.environ['RANK'] != '0' or len(os.sched_getaffinity(0)) == 1 or os.sched_yield()"
    code = f"import os\nany({bound} for _ in range(10**7))\nprint(*os.sched_getaffinity(0))"
    printed = cluster(2, RATE, processors=[1, 0.4]).run([sys.executable, "-c", code])
    assert printed.split() == [str(min(os.sched_getaffinity(0)))]


@pytest.mark.alone
def test_retransmits_are_counted_where_many_send_to_one_through_a_small_queue(cluster: Up) -> None:
    dropping = cluster(6, RATE, queue_bytes=20_000)
    assert transfer(dropping)[0] == 5 * SIZE
    assert dropping.retransmits() > 0
    lossless = cluster(6, RATE)
    assert transfer(lossless)[0] == 5 * SIZE
    # A probe for a last segment, now and then.
    assert lossless.retransmits() < 0.01 * 5 * SIZE / 1448


def test_a_link_that_is_down_carries_nothing_until_it_is_up(cluster: Up) -> None:
    pair = cluster(2, RATE)
    pair.link_down(1)
    with pytest.raises(RunTimeoutError, match=r"rank\(s\) 0, 1 of 2 still ran after 1 s"):
        pair.run(python(TRANSFER, 10), timeout_s=1)
    pair.link_up(1)
    assert transfer(pair, 10)[0] == 10


def test_hosts_cannot_reach_the_machines_own_network(cluster: Up) -> None:
    interfaces, routes = socket.if_nameindex(), Path("/proc/net/route").read_text()
    one = cluster(1, RATE)
    assert (socket.if_nameindex(), Path("/proc/net/route").read_text()) == (interfaces, routes)
    addresses = ["127.0.0.1"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing, but chooses the address to send from
            addresses.append(probe.getsockname()[0])
        except OSError:
            pass
    with socket.create_server(("", 0)) as server:
        reach = python(REACH, server.getsockname()[1], *addresses)
        assert tool(*reach) == "".join(f"reached {address}\n" for address in addresses)
        assert one.run(reach) == "".join(f"failed {address}\n" for address in addresses)


def test_two_clusters_at_once(cluster: Up) -> None:
    first, second = cluster(2, RATE), cluster(2, RATE)
    idle = second.start(["sleep", "600"])
    sent = second.sent_bytes(1)
    assert transfer(first)[0] == SIZE
    assert second.sent_bytes(1) - sent < 0.1 * SIZE
    assert transfer(second)[0] == SIZE
    assert idle[0].end() == -signal.SIGKILL


def test_a_killed_or_failed_rank_ends_the_run_with_its_last_words(cluster: Up) -> None:
    three = cluster(3, RATE)
    with pytest.raises(RankFailedError, match="rank 1 was killed by SIGKILL") as caught:
        three.run(["sh", "-c", "[ $RANK = 1 ] && kill -9 $$; sleep 600"])
    assert caught.value.rank == 1
    said = " ".join(tool("ip", "netns", "pids", name) for name in three.namespaces)
    with suppress(ProcessLookupError):  # ended meanwhile
        assert all_end([os.pidfd_open(int(pid)) for pid in said.split()])
    failing = ["sh", "-c", "[ $RANK = 2 ] && echo no such network >&2 && exit 3; sleep 600"]
    with pytest.raises(RankFailedError, match="rank 2 ended with exit code 3") as caught:
        three.run(failing)
    assert str(caught.value).endswith("\nno such network")


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_nothing_is_left(cluster: Up, error: type[Exception] | None) -> None:
    cluster(1, RATE)
    pidfds = []
    with suppress(ZeroDivisionError), VirtualCluster(2, RATE) as pair:
        assert len(names_like(pair.namespaces[0])) == 3
        # With a child in a session of its own, which no signal to the rank's group reaches.
        for rank in pair.start(["sh", "-c", "setsid sleep 600 & echo $! >&2; echo ok; sleep 600"]):
            rank.wait_for_line("ok", WAIT_S)
            pidfds += [os.pidfd_open(rank.pid), os.pidfd_open(int(rank.stderr))]
        if error is not None:
            raise error
    assert not names_like(pair.namespaces[0])
    assert len(pidfds) == 4
    assert all_end(pidfds)


BROKEN: list[tuple[int, int, dict[str, Any], str]] = [
    (2, RATE, {"congestion_control": "none_such"}, "'none_such'; .*'reno'"),
    (2, RATE, {"queue_bytes": -1}, 'tc .*illegal value for "limit"'),
    (0, RATE, {}, "0 hosts"),
    (255, RATE, {}, "255 hosts"),
    (2, 0, {}, "rate of 0"),
]


@pytest.mark.parametrize(("hosts", "rate", "options", "message"), BROKEN)
def test_a_cluster_that_cannot_be_or_fails_half_made_leaves_nothing(
    cluster: Up, hosts: int, rate: int, options: dict[str, Any], message: str
) -> None:
    cluster(1, RATE)
    made: list[VirtualCluster] = []

    def up() -> None:
        made.append(VirtualCluster(hosts, rate, **options))
        with made[0]:
            pytest.fail("it came up")

    with pytest.raises(ClusterError, match=message):
        up()
    assert not any(names_like(each.namespaces[0]) for each in made)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_a_killed_owners_cluster_goes(cluster: Up, number: signal.Signals) -> None:
    living = cluster(2, RATE)
    owner = subprocess.Popen(python(OWNER), stdout=subprocess.PIPE, text=True, cwd=ROOT)
    with owner:
        assert owner.stdout is not None
        name, *pids = owner.stdout.readline().split()
        assert len(names_like(name)) == 3
        pidfds = [os.pidfd_open(int(pid)) for pid in pids]
        owner.send_signal(number)
    assert all_end(pidfds)
    if number == signal.SIGKILL:
        assert len(names_like(name)) == 3
        cluster(1, RATE)
    else:
        assert owner.returncode == 128 + number
    assert not names_like(name)
    assert transfer(living, 10)[0] == 10


def test_a_number_given_to_another_process_does_not_keep_a_cluster(cluster: Up) -> None:
    cluster(1, RATE)
    mine, dead = f"{new_prefix()}-h0", f"fc{os.getpid()}-1-0-h0"
    for name in (mine, dead):
        tool("ip", "netns", "add", name)
    try:
        remove_leftovers()
        assert [(FOLDER / name).exists() for name in (mine, dead)] == [True, False]
    finally:
        tool("ip", "netns", "delete", mine)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterUnavailableError, match="needs root; this is uid 1000"):
        VirtualCluster(2, RATE).__enter__()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ClusterUnavailableError, match="needs ip; it is not in PATH"):
        VirtualCluster(2, RATE).__enter__()


def test_command_line(
    cluster: Up, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster(1, RATE)
    for script, code, printed, said in (
        ("echo $RANK of $WORLD_SIZE", 0, "0 of 2\n", "rate_bits_per_s: 2000000\n"),
        ("exit $RANK", 1, "", "error: rank 1 ended with exit code 1; it wrote nothing"),
    ):
        words = ["--hosts", "2", "--rate", "2mbit", "--", "sh", "-c", script]
        monkeypatch.setattr(sys, "argv", ["cluster", *words])
        assert main() == code
        out, errors = capfd.readouterr()
        assert (out, said in errors) == (printed, True)
