"""A cluster emulated on one Linux machine: hosts are network namespaces joined by shaped links.

    python -m benchmarks.emulated.virtual_cluster --hosts 4 --rate 100mbit -- python script.py
    python -m benchmarks.emulated.virtual_cluster --hosts 8 --rate 1gbit    # checks the links

Each host has one link to a bridge, which is in a namespace of its own: nothing is added to the
machine's own network, and no packet gets there. Token buckets (tbf) hold each link to its rate in
both directions. They are to be as much like a wire as can be: a host hands over short segments, a
bucket saves up little more than one, and connections share a link evenly. Nothing is
dropped, as with InfiniBand or Ethernet's flow control: a queue holds what all windows together let
out, unless it is said to be shorter. Delay is not emulated (it takes netem, which many kernels
lack): a message's latency is the CPU's, and one shorter than the bucket is not slowed down at all.
All hosts share the machine's CPU: keep hosts times rate under some 4 Gbit/s for each core, or it is
the limit.

Needs root and the commands ip, tc and setpriv.
"""

import argparse
import platform
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Self

from benchmarks.emulated.cluster_run import Rank, RunError, start_ranks, wait_for_ranks
from benchmarks.emulated.link_check import link_shares
from benchmarks.emulated.namespaces import (
    ClusterError,
    ClusterUnavailableError,
    execute,
    inside,
    new_prefix,
    remove,
    remove_leftovers,
    require,
)
from benchmarks.emulated.processors import Shares, check_share

INTERFACE = "veth0"
"""The name of each host's one link."""

MAX_HOSTS = 254

WINDOW_SEGMENTS = 8
"""Of one connection, that may be under way."""

MIN_SEGMENT_BYTES = 4_096
MIN_SHARED_SEGMENT_BYTES = 16_384
"""Where hosts share processors, which have no time for shorter ones."""
MAX_SEGMENT_BYTES = 65_536


class VirtualCluster:
    """Hosts, for the time of a `with` block; what was started on them ends with it.

    SIGTERM, unless it has a handler, becomes SystemExit for that time, so that it takes the cluster
    down. A process killed outright leaves namespaces behind, which the next cluster made removes.

    Args:
        hosts: 1 to 254. Host i has the address 10.77.0.(i + 1).
        rate_bits_per_s: of each link in each direction, headers included (TCP's payload is 0.956
            of it at most).
        queue_bytes: what a link's end holds back before it drops; None: as much as there can be.
        processors: what each host has of them, and no more (0.5: half of one), or one number for
            each host; None: whatever the others leave.
        congestion_control: TCP's. The kernel's default is a setting of the machine, and numbers
            taken with different ones do not compare.

    Raises: ClusterUnavailableError on entry; ClusterError for arguments it cannot follow.
    """

    def __init__(
        self,
        hosts: int,
        rate_bits_per_s: int,
        *,
        queue_bytes: int | None = None,
        processors: float | Sequence[float] | None = None,
        congestion_control: str = "reno",
    ) -> None:
        if not 1 <= hosts <= MAX_HOSTS:
            raise ClusterError(f"{hosts} hosts; a cluster has 1 to {MAX_HOSTS}")
        if rate_bits_per_s < 1:
            raise ClusterError(f"a rate of {rate_bits_per_s} bits/s; it must be positive")
        each = _of_each(processors, hosts)
        for own in each or ():
            check_share(own)
        self.hosts = hosts
        is_shared = each is None or min(each) < 1
        self.segment_bytes = _segment_bytes(rate_bits_per_s, is_shared)
        self.window_bytes = WINDOW_SEGMENTS * self.segment_bytes
        # Two hosts may have several connections.
        most_bytes = 2 * hosts * self.window_bytes
        self.queue_bytes = most_bytes if queue_bytes is None else queue_bytes
        self.processors = each
        self.congestion_control = congestion_control
        self._rates = [rate_bits_per_s] * hosts
        prefix = new_prefix()
        self.namespaces = tuple(f"{prefix}-h{host}" for host in range(hosts))
        self._switch = f"{prefix}-switch"
        self._shares: Shares | None = None
        self._ranks: list[Rank] = []
        self._runs = 0
        self._handles_term = False

    def __enter__(self) -> Self:
        require()
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        ):
            signal.signal(signal.SIGTERM, _exit)
            self._handles_term = True
        try:
            remove_leftovers()
            self._up()
            if self.processors is not None:
                self._shares = Shares(self.namespaces, self.processors)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with _signals_held():
                for rank in self._ranks:
                    rank.end()
                remove((*self.namespaces, self._switch))
                if self._shares is not None:
                    self._shares.remove()
        finally:
            if self._handles_term:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def run(
        self,
        command: Sequence[str],
        *,
        ranks_per_host: int = 1,
        timeout_s: float = 120.0,
        environment: Mapping[str, str] | None = None,
        live: bool = False,
    ) -> str:
        """Runs a command as every rank of one world; what rank 0 printed (`live`: it has already).

        Raises: RankFailedError with the rank that failed first and the end of its stderr,
        RunTimeoutError. No rank is left running.
        """
        ranks = self.start(
            command, ranks_per_host=ranks_per_host, environment=environment, live=live
        )
        return wait_for_ranks(ranks, timeout_s)

    def start(
        self,
        command: Sequence[str],
        *,
        ranks_per_host: int = 1,
        environment: Mapping[str, str] | None = None,
        live: bool = False,
    ) -> list[Rank]:
        """Starts what `run` runs, and leaves the ranks to the caller.

        They have torchrun's environment, changed by `environment`. They end with the cluster or
        with the thread that calls this.
        """
        self._runs += 1
        meeting = {
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(29500 + self._runs % 1000),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            **(environment or {}),
        }
        ranks = start_ranks(self.namespaces, command, ranks_per_host, meeting, live)
        if self._shares is not None:
            for rank in ranks:
                self._shares.add(rank.rank // ranks_per_host, rank.pid)
        self._ranks += ranks
        return ranks

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def link_down(self, host: int) -> None:
        """Cuts a host off at the switch, as a pulled cable does; nobody is told."""
        execute((["ip", "-n", self._switch, "link", "set", f"p{host}", "down"], ()))

    def link_up(self, host: int) -> None:
        execute((["ip", "-n", self._switch, "link", "set", f"p{host}", "up"], ()))

    def set_rate(self, host: int, bits_per_s: int) -> None:
        """Changes the rate of one host's link, in both directions."""
        ends = (self.namespaces[host], INTERFACE), (self._switch, f"p{host}")
        for name, device in ends:
            change = f"qdisc change {self._bucket(device, bits_per_s)}"
            execute((["tc", "-n", name, "-batch", "-"], [change]))
        self._rates[host] = bits_per_s

    def sent_bytes(self, host: int) -> int:
        """Bytes that the host has put on its link since the start, headers included."""
        text = inside(self.namespaces[host], Path("/proc/thread-self/net/dev").read_text)
        line = next(line for line in text.splitlines() if line.strip().startswith(f"{INTERFACE}:"))
        return int(line.split(":")[1].split()[8])

    def retransmits(self) -> int:
        """TCP segments that all hosts together have sent again since the start."""
        total = 0
        for name in self.namespaces:
            text = inside(name, Path("/proc/thread-self/net/snmp").read_text)
            titles, values = (line.split() for line in text.splitlines() if line[:4] == "Tcp:")
            total += int(dict(zip(titles, values, strict=True))["RetransSegs"])
        return total

    def conditions(self) -> dict[str, str | int | float]:
        """What figures taken here depend on, for whoever reports them."""
        return {
            "hosts": self.hosts,
            "rate_bits_per_s": _one_or_all(self._rates),
            "burst_bytes": self._burst_bytes,
            "segment_bytes": self.segment_bytes,
            "window_bytes": self.window_bytes,
            "queue_bytes": self.queue_bytes,
            "processors": "shared" if self.processors is None else _one_or_all(self.processors),
            "delay": "not emulated",
            "congestion_control": self.congestion_control,
            "kernel": platform.release(),
        }

    def _up(self) -> None:
        everywhere = (*self.namespaces, self._switch)
        execute((["ip", "-batch", "-"], [f"netns add {name}" for name in everywhere]))
        for name in everywhere:
            inside(name, self._set_kernel)
        link = f"link add {INTERFACE} netns {{}} type veth peer name p{{}} netns {self._switch}"
        bridge = f"link add switch netns {self._switch} type bridge mcast_snooping 0"
        links = [link.format(name, host) for host, name in enumerate(self.namespaces)]
        execute((["ip", "-batch", "-"], [bridge, *links]))
        rate = self._rates[0]
        up = ["link set switch up"]
        up += [f"link set p{host} master switch up" for host in range(self.hosts)]
        ports = [f"qdisc add {self._bucket(f'p{host}', rate)}" for host in range(self.hosts)]
        work: list[tuple[list[str], Sequence[str]]] = [
            (["ip", "-n", self._switch, "-batch", "-"], up),
            (["tc", "-n", self._switch, "-batch", "-"], ports),
        ]
        for host, name in enumerate(self.namespaces):
            address = f"address add {self.address(host)}/24 dev {INTERFACE}"
            segments = f"link set {INTERFACE} gso_max_size {self.segment_bytes} up"
            up = ["link set lo up", address, segments]
            work.append((["ip", "-n", name, "-batch", "-"], up))
            port = f"qdisc add {self._bucket(INTERFACE, rate)}"
            work.append((["tc", "-n", name, "-batch", "-"], [port]))
        execute(*work)

    def _bucket(self, device: str, bits_per_s: int) -> str:
        limits = f"rate {bits_per_s}bit burst {self._burst_bytes} limit {self.queue_bytes}"
        return f"dev {device} root tbf {limits}"

    @property
    def _burst_bytes(self) -> int:
        """What a bucket saves up, so that an idle link makes up for it: as little as can be. What
        does not fit, with the headers of its packets, would be cut up by the CPU, which then holds
        up all links.
        """
        return 3 * self.segment_bytes // 2

    def _set_kernel(self) -> None:
        """The settings of one namespace, before it has links."""
        settings = {
            "ipv4/tcp_congestion_control": self.congestion_control,
            # Training sends in bursts with pauses between, none of which should start slowly, ...
            "ipv4/tcp_slow_start_after_idle": "0",
            # ... nor should a run depend on what the one before it has met.
            "ipv4/tcp_no_metrics_save": "1",
            # The counts are of what ranks send, not of the neighbors that IPv6 looks for.
            "ipv6/conf/default/disable_ipv6": "1",
            # What waits at the switch is still in its sender's account, for all is one kernel. TCP
            # lets out so much by the rate that it guesses; a guess that is far too low leaves two
            # segments of each connection, always.
            "ipv4/tcp_pacing_ca_ratio": "1",
            "ipv4/tcp_pacing_ss_ratio": "1",
            "ipv4/tcp_autocorking": "0",
            "ipv4/tcp_rmem": f"4096 {self.window_bytes} {self.window_bytes}",
            "ipv4/tcp_wmem": f"4096 {2 * self.window_bytes} {2 * self.window_bytes}",
        }
        for name, value in settings.items():
            path = Path("/proc/sys/net", name)
            try:
                path.write_text(value)
            except OSError as error:
                if "congestion" in name:
                    choices = path.with_name("tcp_allowed_congestion_control").read_text().split()
                    raise ClusterError(
                        f"congestion_control is {value!r}; a namespace here may have {choices}"
                    ) from error
                if not isinstance(error, FileNotFoundError):  # a kernel without IPv6
                    raise ClusterUnavailableError(f"{path} cannot be set: {error}") from error


def _segment_bytes(bits_per_s: int, is_shared: bool) -> int:
    """What TCP hands over at a time. An idle link lets half as much again pass at once, as no wire
    does, so shorter is better while the processors have time for it. At 1 Gbit/s they have none.
    """
    least = MIN_SHARED_SEGMENT_BYTES if is_shared else MIN_SEGMENT_BYTES
    return min(MAX_SEGMENT_BYTES, max(least, bits_per_s * 32_768 // 1_000_000_000))


def _of_each(processors: float | Sequence[float] | None, hosts: int) -> list[float] | None:
    """The share of each host. Raises: ClusterError."""
    if processors is None:
        return None
    each = [*processors] if isinstance(processors, Sequence) else [processors] * hosts
    if len(each) != hosts:
        raise ClusterError(f"shares of the processors for {len(each)} hosts; there are {hosts}")
    return each


def _one_or_all(by_host: Sequence[float]) -> float | str:
    return by_host[0] if len(set(by_host)) == 1 else str(by_host)


def _exit(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def _signals_held() -> Iterator[None]:
    """SIGINT and SIGTERM come after the block: a second Ctrl-C leaves no half of a cluster."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    numbers = int(signal.SIGINT), int(signal.SIGTERM)
    before = [signal.signal(number, lambda number, _: came.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler or signal.SIG_DFL)
        for number in came:
            signal.raise_signal(number)


def parse_rate(text: str) -> int:
    """Bits per second of a rate as tc has it: 200mbit, 1gbit, 2.5gbit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", text.lower())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate; 200mbit or 1gbit would be")
    return round(float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[match[2]])


def main() -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", type=parse_rate, default="200mbit")
    parser.add_argument("--queue-bytes", type=int, default=None)
    parser.add_argument("--congestion-control", default="reno")
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=3600.0)
    parser.add_argument("command", nargs="*", help="run as every rank; none: the links are checked")
    given = parser.parse_args()
    try:
        with VirtualCluster(
            given.hosts,
            given.rate,
            queue_bytes=given.queue_bytes,
            congestion_control=given.congestion_control,
        ) as cluster:
            for name, value in cluster.conditions().items():
                # A command has stdout for itself.
                print(f"{name}: {value}", file=sys.stderr if given.command else sys.stdout)
            if given.command:
                cluster.run(
                    given.command,
                    ranks_per_host=given.ranks_per_host,
                    timeout_s=given.timeout_s,
                    live=True,
                )
                return 0
            hosts = [(name, cluster.address(host)) for host, name in enumerate(cluster.namespaces)]
            for name, share in link_shares(hosts, given.rate).items():
                print(f"{name}: {share:.3f} of the rate")
            print(f"retransmits: {cluster.retransmits()}")
    except (ClusterError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
