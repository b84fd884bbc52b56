"""Addresses of both kinds."""

import socket
from types import SimpleNamespace

import psutil
import pytest

from firecaffe.cluster.addresses import (
    LOOPBACK,
    check_outward,
    is_here,
    is_inward,
    join_place,
    listen_to_all,
    own_addresses,
    split_place,
)
from firecaffe.errors import LaunchError
from tests.loopback import has_ipv6

NO_HOST = ["", "node", ":29400", "[]:1", "a b:1", "[a]b:1", "[::1]", "::1:29400"]
NO_PORT = ["node:", "node:0", "node:65536", "node:port", "[::1]29400"]
NO_PLACES = [*NO_HOST, *NO_PORT]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("node-a.example:29400", ("node-a.example", 29400)),
        ("192.0.2.1:1", ("192.0.2.1", 1)),
        ("[2001:db8::1]:65535", ("2001:db8::1", 65535)),
        ("[fe80::1%eth0]:29400", ("fe80::1%eth0", 29400)),
    ],
)
def test_a_place_is_taken_apart_and_put_together(text: str, place: tuple[str, int]) -> None:
    assert split_place(text) == place
    assert join_place(*place) == text


@pytest.mark.parametrize("text", NO_PLACES)
def test_what_is_no_place(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        split_place(text)


def interfaces(*addresses: str) -> dict[str, list[SimpleNamespace]]:
    """As psutil tells them, which adds the interface to an address of one link alone."""
    families = [socket.AF_INET6 if ":" in each else socket.AF_INET for each in addresses]
    pairs = zip(families, addresses, strict=True)
    return {"eth0": [SimpleNamespace(family=family, address=each) for family, each in pairs]}


@pytest.mark.parametrize(
    ("has", "tells"),
    [
        (["127.0.0.1", "::1", "192.0.2.1", "2001:db8::1"], ["192.0.2.1", "2001:db8::1"]),
        (["::1", "2001:db8::1", "fe80::1%eth0"], ["2001:db8::1"]),
        (["127.0.0.1", "::1"], [LOOPBACK]),
    ],
)
def test_what_a_host_tells_others(
    monkeypatch: pytest.MonkeyPatch, has: list[str], tells: list[str]
) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces(*has))
    assert own_addresses(LOOPBACK) == tells


def test_whose_an_address_is(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert is_inward("node-a")
    check_outward("node-a", "")  # the only interface it can be
    names_lead_to("192.0.2.9", monkeypatch)
    assert not is_here("node-a")
    assert not is_inward("node-a")


def test_a_name_that_leads_to_none_of_several_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    several = {"eth0": interfaces("192.0.2.1")["eth0"], "docker0": interfaces("172.17.0.1")["eth0"]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: several)
    names_lead_to("127.0.1.1", monkeypatch)
    with pytest.raises(LaunchError, match=r"node-a is 127\.0\.1\.1 .*192\.0\.2\.1.*; say which"):
        check_outward("node-a", "say which")
    check_outward("localhost", "")  # all of them on this host
    names_lead_to("192.0.2.9", monkeypatch)
    check_outward("node-a", "")


def test_a_listener_is_called_by_both_kinds() -> None:
    with listen_to_all(2) as listener:
        port = listener.getsockname()[1]
        for host in (LOOPBACK, "::1") if has_ipv6() else (LOOPBACK,):
            with socket.create_connection((host, port)), listener.accept()[0]:
                pass
