"""Hosts and origins: who may speak to a server through somebody's browser."""

from __future__ import annotations

import pytest

from chatserve.errors import StartupError
from chatserve.server.origin import Gate, is_loopback

LOCAL = Gate("127.0.0.1")
PUBLIC = Gate("0.0.0.0", ["chat.example.org"], ["https://app.example.org"])


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST.", "::1", "127.9.9.9"])
def test_loopback_is_recognised(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org"])
def test_what_others_can_reach_is_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8000", "localhost:8000", "localhost", "[::1]:8000", "LocalHost:9", "localhost.:1"]
)
def test_a_local_server_is_known_by_its_local_names(host: str) -> None:
    assert LOCAL.refusal(host, None) is None


@pytest.mark.parametrize(
    "host",
    [
        None,
        "",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "192.168.0.3:8000",
        "a@b:c",
        "localhost@evil.example",
        ".",
    ],
)
def test_a_rebound_name_is_refused(host: str | None) -> None:
    assert LOCAL.refusal(host, None)


@pytest.mark.parametrize(
    "host",
    [
        "localhost; script-src *",
        "localhost/; script-src *",
        "localhost?; script-src *",
        "; script-src * @localhost",
        "localhost:80 ; script-src *",
        "[::1]; script-src *",
        "local\nhost",
        "evil.example@localhost",
    ],
)
def test_a_host_that_would_say_more_in_a_header_is_refused(host: str) -> None:
    assert LOCAL.refusal(host, None)
    assert PUBLIC.refusal(host, None)


@pytest.mark.parametrize("host", ["chat.example.org", "chat.example.org:443", "192.168.0.3:8000", "[fe80::1]:8000"])
def test_a_public_server_is_known_by_its_addresses_and_allowed_names(host: str) -> None:
    assert PUBLIC.refusal(host, None) is None
    assert PUBLIC.refusal("other.example.org", None)


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("localhost:8000", "http://localhost:8000"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("localhost", "http://localhost"),
        ("localhost:80", "http://localhost"),
        ("localhost", "https://localhost"),
    ],
)
def test_the_own_origin_passes(host: str, origin: str) -> None:
    assert LOCAL.refusal(host, origin) is None


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "http://127.0.0.1:8001",
        "http://localhost:8000",
        "http://127.0.0.1.evil.example:8000",
        "null",
        "",
        "file://",
        "http://",
        "chrome-extension://127.0.0.1:8000",
        "http://127.0.0.1:8000@evil.example",
        "http://127.0.0.1:99999",
        "http://evil.example@127.0.0.1:8000",
        "http://127.0.0.1:8000/path",
        "http://127.0.0.1:8000\n",
    ],
)
def test_a_foreign_origin_is_refused(origin: str) -> None:
    assert LOCAL.refusal("127.0.0.1:8000", origin)


def test_an_allowed_origin_passes() -> None:
    assert PUBLIC.refusal("chat.example.org", "https://app.example.org") is None
    assert PUBLIC.refusal("chat.example.org", "https://app.example.org:443") is None
    assert PUBLIC.refusal("chat.example.org", "http://app.example.org")
    assert Gate("::1", (), ["HTTPS://App.Example.org/"]).refusal("[::1]", "https://app.example.org") is None


@pytest.mark.parametrize("origin", ["app.example.org", "*", "null", "https://", "ftp://app.example.org", "https://a b"])
def test_an_allowed_origin_that_is_none_is_an_error(origin: str) -> None:
    with pytest.raises(StartupError, match="--allowed-origin"):
        Gate("127.0.0.1", (), [origin])


@pytest.mark.parametrize("host", ["", "https://chat.example.org", "a b", "*.example.org"])
def test_an_allowed_host_that_is_none_is_an_error(host: str) -> None:
    with pytest.raises(StartupError, match="--allowed-host"):
        Gate("127.0.0.1", [host])
