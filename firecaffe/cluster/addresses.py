"""Addresses of hosts, IPv4 and IPv6 alike: HOST:PORT as text, and which of them are this host's."""

import ipaddress
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from firecaffe.errors import LaunchError
from firecaffe.output import say

LOOPBACK = "127.0.0.1"


def split_place(text: str) -> tuple[str, int]:
    """Split HOST:PORT, or [IPv6]:PORT. Raises: ValueError if it is neither."""
    match = re.fullmatch(r"(?:\[([^\[\]\s]+)\]|([^:\[\]\s]+)):(\d{1,5})", text)
    port = int(match[3]) if match else 0
    if match is None or not 0 < port < 1 << 16:
        raise ValueError(f"{text!r} is not HOST:PORT, or [IPv6]:PORT")
    return match[1] or match[2], port


def join_place(host: str, port: int | str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_known(host: str, word: str) -> None:
    """Check that a host's name can be resolved; `word` is the setting. Raises: LaunchError."""
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        raise LaunchError(
            f"{word} names {host!r}, and no such host is known here: {error}"
        ) from error


SAY_EVERY_S = 10.0

FIRST_S, TRY_S = 0.05, 1.0
"""Seconds between the first two attempts to reach a listener, and of or between later ones."""


def wait_for_listener(
    what: str,
    place: tuple[str, int],
    patience_s: float,
    advice: str,
    is_own: Callable[[], bool] = lambda: False,
    is_silent: bool = False,
) -> bool:
    """Wait until `what` listens at a place, whose name need not be known yet, and say so meanwhile.

    Return False as soon as `is_own()`: nobody does, and this process is to. Raises: LaunchError.
    """
    begun_s = said_s = time.monotonic()
    where, pause_s = join_place(*place), FIRST_S
    while True:
        try:
            socket.create_connection(place, TRY_S).close()
            return True
        except (OSError, UnicodeError) as error:
            if is_own():
                return False
            reason = getattr(error, "strerror", None) or str(error)
        now = time.monotonic()
        if now - begun_s > patience_s:
            raise LaunchError(
                f"{what} did not answer at {where} in {patience_s:.0f} s ({reason}); {advice}"
            )
        if now - said_s >= SAY_EVERY_S and not is_silent:
            waited = f"{now - begun_s:.0f} of {patience_s:.0f} s"
            say(f"waiting for {what} at {where}, {waited}: {reason}")
            said_s = now
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, TRY_S)


BACKLOG = 1024
"""Most connections that wait in the kernel."""


def listen(one_host: bool, host: str = LOOPBACK, port: int = 0) -> socket.socket:
    """Open a listener at `host`, or for several hosts at all addresses; port 0 takes a free one."""
    if one_host:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[:2], family=family, backlog=BACKLOG)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=BACKLOG, dualstack_ipv6=both)


def own_addresses(towards: str) -> list[str]:
    """Return this host's outward addresses, first those used to reach `towards`, IPv4 first."""
    addresses: list[str] = []
    with suppress(OSError, UnicodeError):
        ways = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)
        for family, kind, _, _, there in sorted(ways, key=lambda way: way[0] != socket.AF_INET):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(there)  # sends nothing
                addresses.append(probe.getsockname()[0])
    for of_interface in psutil.net_if_addrs().values():
        known = (socket.AF_INET, socket.AF_INET6)
        addresses += [address.address for address in of_interface if address.family in known]
    return [address for address in dict.fromkeys(addresses) if _is_outward(address)] or [LOOPBACK]


def is_here(host: str) -> bool:
    local_addresses = {
        address.address for addresses in psutil.net_if_addrs().values() for address in addresses
    }
    return any(
        host_address in local_addresses or _is_loopback(host_address)
        for host_address in _addresses_of(host)
    )


def is_loopback_only(name: str) -> bool:
    """Whether a host's name resolves only to its loopback (Debian: 127.0.1.1), or not at all."""
    return all(_is_loopback(address) for address in _addresses_of(name))


def is_one_host(name: str) -> bool:
    """Whether a name is literally loopback, so that all ranks that meet there are on one host."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def check_reachable(name: str, instead: str) -> None:
    """Check that others can reach this host if `name` is inward. Raises: LaunchError."""
    addresses = own_addresses(name)
    if not is_loopback_only(name) or is_one_host(name) or len({*map(interface_of, addresses)}) == 1:
        return
    here = ", ".join(_addresses_of(name)) or "not known"
    raise LaunchError(
        f"{name} is {here} on this host, where others do not reach it, and it has several "
        f"addresses ({', '.join(addresses)}); {instead}"
    )


def interface_of(address: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    return "lo"


def _is_outward(address: str) -> bool:
    # A link-local IPv6 address means nothing without the name of an interface.
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return not parsed.is_loopback and not (parsed.version == 6 and parsed.is_link_local)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _addresses_of(host: str) -> list[str]:
    try:
        return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(host, None)))
    except (OSError, UnicodeError):
        return []
