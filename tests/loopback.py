"""This host's own network: whether it can be reached by IPv6, at least by itself; a free port."""

import socket


def has_ipv6() -> bool:
    """Sockets of IPv6 there may be where no address is: an administrator can take them away."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
