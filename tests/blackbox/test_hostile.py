"""What no honest client sends: values that break careless code get an error, and the socket goes on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.blackbox.client import ChatClient, RequestFailedError

Connect = Callable[..., ChatClient]


def nested(depth: int) -> list[object]:
    value: list[object] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value", [10**400, -(10**400), nested(150), [[[["x" * 100_000]]]]], ids=["huge", "tiny", "deep", "long"]
)
async def test_a_value_beyond_all_measure_is_bad_params_and_the_socket_goes_on(connect: Connect, value: object) -> None:
    async with connect() as client:
        session = await client.create()
        for name in ("temperature", "seed", "stop"):
            with pytest.raises(RequestFailedError, match="bad_params") as failed:
                await client.request("session.update", session=session, params={name: value})
            assert name in failed.value.frame["detail"]
            assert len(failed.value.frame["detail"]) < 300
        with pytest.raises(RequestFailedError, match="bad_params"):
            await client.request("session.list", limit=value)
        assert await client.request("session.update", session=session, params={"temperature": 1})
