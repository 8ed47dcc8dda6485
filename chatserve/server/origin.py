"""Which `Host` and `Origin` a request may carry.

Owns the defence against DNS rebinding (a page whose name was pointed at our address) and against pages of other sites
that open a socket or post a form with our user's browser. Pure: headers in, a refusal or None out.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from typing import Final

from chatserve.errors import StartupError

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_HOST: Final = re.compile(r"(?P<name>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{0,5}))?")


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
        """Take the settings in.

        Raises:
            StartupError: an allowed host or origin is none, and would silently allow nothing.
        """
        self._loopback_only = is_loopback(bind_host)
        names = {"localhost", bind_host, *allowed_hosts}
        if not self._loopback_only:
            names |= {socket.gethostname(), socket.getfqdn()}
        self._names = {_bare_name(name) for name in names} - {""}
        for host in allowed_hosts:
            if not _bare_name(host):
                raise StartupError(f"--allowed-host {host!r} is no host: expected a name such as chat.example.org")
        self._origins: set[tuple[str, str, int]] = set()
        for text in allowed_origins:
            origin = _origin(text.rstrip("/"))
            if origin is None:
                raise StartupError(
                    f"--allowed-origin {text!r} is no origin: expected http:// or https:// and a host, such as "
                    "https://chat.example.org"
                )
            self._origins.add(origin)

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
    scheme, _, authority = text.lower().partition("://")
    name, port = _name_and_port(authority)
    if scheme not in {"http", "https"} or not name:
        return None
    return scheme, name, port or _DEFAULT_PORTS[scheme]


def _name_and_port(host: str) -> tuple[str, int | None]:
    """The parts of `HOST` or `HOST:PORT`; an empty name where it is anything else: it is copied into a header."""
    found = _HOST.fullmatch(host)
    if found is None:
        return "", None
    return found["name"].strip("[]").rstrip(".").lower(), int(found["port"]) if found["port"] else None


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
