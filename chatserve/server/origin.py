"""Which `Host` and `Origin` a request may carry.

Owns the defence against DNS rebinding (a page whose name was pointed at our address) and against pages of other sites
that open a socket or post a form with our user's browser. Pure: headers in, a refusal or None out.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

_DEFAULT_PORTS: Final = {"http": 80, "https": 443, "ws": 80, "wss": 443}


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`."""
    if host.lower().rstrip(".") == "localhost":
        return True
    address = _address(host)
    return address is not None and address.is_loopback


class Gate:
    """Built once from what the server is bound to and what the operator allows.

    Names are compared without ports, which a proxy or a container may change. A bare address in `Host` cannot be
    rebound: it is refused only where the server is bound to loopback and the address is not.
    """

    def __init__(self, bind_host: str, allowed_hosts: Iterable[str] = (), allowed_origins: Iterable[str] = ()) -> None:
        self._loopback_only = is_loopback(bind_host)
        names = {"localhost", bind_host, *allowed_hosts}
        if not self._loopback_only:
            names |= {socket.gethostname(), socket.getfqdn()}
        self._names = {_bare_name(name) for name in names}
        self._origins = {origin for origin in map(_origin, allowed_origins) if origin is not None}

    def refusal(self, host: str | None, origin: str | None) -> str | None:
        """Why a request is refused; None: it is not."""
        if host is None or not self._known(host):
            return f"the host {host!r} is not one this server is known by; allow it with --allowed-host"
        if origin is not None and not self._same(origin, host):
            return f"the origin {origin!r} is neither this server's own nor allowed; allow it with --allowed-origin"
        return None

    def _known(self, host: str) -> bool:
        name = _bare_name(host)
        if name in self._names:
            return True
        address = _address(name)
        if address is None:
            return False
        return address.is_loopback or not self._loopback_only

    def _same(self, origin: str, host: str) -> bool:
        given = _origin(origin)
        if given is None:
            return False
        if given in self._origins:
            return True
        scheme, name, port = given
        # Behind a proxy that ends TLS our own scheme says nothing, so a port left out is the origin's default.
        own_name, own_port = _name_and_port(host)
        return name == own_name and port == (own_port or _DEFAULT_PORTS[scheme])


def _origin(text: str) -> tuple[str, str, int] | None:
    try:
        parts = urlsplit(text.strip())
        port = parts.port
    except ValueError:
        return None
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        return None
    return parts.scheme, parts.hostname.rstrip("."), port or _DEFAULT_PORTS[parts.scheme]


def _name_and_port(host: str) -> tuple[str, int | None]:
    try:
        parts = urlsplit("//" + host.strip())
        return (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        return "", None


def _bare_name(host: str) -> str:
    """A host name or address, without port, brackets, case or final dot."""
    if _address(host) is not None:
        return host.strip("[]").lower()
    return _name_and_port(host)[0]


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
