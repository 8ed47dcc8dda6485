"""The published schema is the code's, and real frames keep it."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest

from chatserve.server.schema import build_schema, schema_text
from tests.blackbox.client import ChatClient, RequestFailedError
from tests.server.harness import running_server
from tests.server.talking import HELLO, REQUESTS

PUBLISHED = Path(__file__).parents[2] / "docs" / "chat.v1.schema.json"


def validator(name: str) -> jsonschema.Draft202012Validator:
    schema = {**build_schema(), "anyOf": [{"$ref": f"#/$defs/{name}"}]}
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_published_schema_is_current() -> None:
    assert PUBLISHED.read_text() == schema_text(), "run `python -m chatserve.server.schema docs/chat.v1.schema.json`"


@pytest.mark.parametrize("kind", REQUESTS)
def test_each_request_is_in_it_with_its_required_fields(kind: str) -> None:
    clients = validator("ClientFrame")
    frame = {"type": kind, "id": "1", **REQUESTS[kind], "surprise": 1}
    clients.validate(frame)
    clients.validate(HELLO)
    for name in ("id", *REQUESTS[kind]):
        if (kind, name) != ("session.update", "title"):
            assert not clients.is_valid({key: value for key, value in frame.items() if key != name})
    assert not clients.is_valid({**frame, "type": "surprise"})


async def test_every_frame_that_a_server_sends_is_in_it() -> None:
    servers = validator("ServerFrame")
    async with running_server(max_queued=4) as server, ChatClient(server.ws_url) as client:
        session, mirror = await client.started_session(title="t", system="s")
        await client.send({"type": "ping"})
        server.engine.pace.allow(2)
        message, reply = await client.say(session, "hello", max_tokens=50)
        await client.until(lambda: mirror.messages.get(reply, {}).get("text"))
        stop = await client.begin("generation.stop", session=session, message=reply)
        server.engine.pace.release()
        await stop
        await client.request("message.continue", session=session, message=reply, params={"max_tokens": 3})
        await client.ended(session, reply, times=2)
        await client.request("session.update", session=session, title="new", params={"top_k": 1})
        await client.request("branch.select", session=session, message=message)
        with pytest.raises(RequestFailedError):
            await client.request("session.open", session="none")
        await client.request("message.delete", session=session, message=message)
        await client.request("session.list")
        await client.request("session.delete", session=session)
        await client.until(lambda: mirror.deleted)
        for frame in client.frames:
            servers.validate(frame)
        assert {f["type"] for f in client.frames} >= {
            "welcome",
            "ack",
            "error",
            "snapshot",
            "pong",
            "sessions.changed",
            "message.added",
            "message.updated",
            "message.deleted",
            "branch.selected",
            "session.updated",
            "session.deleted",
            "generation.started",
            "generation.delta",
            "generation.end",
        }
