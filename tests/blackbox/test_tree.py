"""Branching conversations: send, edit, regenerate, continue, delete, select."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.blackbox.client import ChatClient, RequestFailedError

Connect = Callable[..., ChatClient]


async def test_a_turn_adds_two_messages_and_streams_the_second(connect: Connect) -> None:
    async with connect() as client:
        session, mirror = await client.started_session()
        message, reply = await client.turn(session, "hello there", max_tokens=8)
        end = await client.ended(session, reply)
        assert (end["reason"], end["status"]) == ("length", "done")
        assert end["usage"]["completion_tokens"] == 8
        assert end["usage"]["ttft_ms"] > 0
        assert isinstance(end["seed"], int)
        assert mirror.leaf == reply
        assert [m["role"] for m in mirror.path(reply)] == ["user", "assistant"]
        assert mirror.messages[message]["status"] == "done"
        assert mirror.title
        async with connect() as other:
            assert (await other.watch(session)).tree() == mirror.tree()


async def test_the_ack_comes_before_the_events_it_caused(connect: Connect) -> None:
    async with connect() as client:
        session, _ = await client.started_session()
        _, reply = await client.turn(session, "order", max_tokens=2)
        kinds = [
            f["type"] for f in client.frames if f.get("reply") == reply or f.get("message") == reply or "leaf" in f
        ]
        assert kinds.index("ack") < kinds.index("message.added") < kinds.index("generation.end")


async def test_the_same_seed_gives_the_same_text_and_another_seed_another(connect: Connect) -> None:
    async with connect() as client:
        session, _ = await client.started_session(params={"temperature": 1.0, "max_tokens": 24})
        message, first = await client.turn(session, "dice", seed=11)
        texts = {first: client.text(session, first)}
        for seed in (11, 12):
            ack = await client.request("message.regenerate", session=session, message=first, params={"seed": seed})
            await client.ended(session, ack["reply"])
            texts[ack["reply"]] = client.text(session, ack["reply"])
        one, again, other = texts.values()
        assert one == again != other
        ack = await client.request("message.regenerate", session=session, message=message)
        drawn = (await client.ended(session, ack["reply"]))["seed"]
        repeat = await client.request("message.regenerate", session=session, message=message, params={"seed": drawn})
        await client.ended(session, repeat["reply"])
        assert client.text(session, repeat["reply"]) == client.text(session, ack["reply"])


async def test_regenerate_makes_a_sibling_and_leaves_other_forks_alone(connect: Connect) -> None:
    async with connect() as client:
        session, mirror = await client.started_session(params={"max_tokens": 3})
        root, one = await client.turn(session, "root")
        user, two = await client.turn(session, "next", one)
        await client.turn(session, "else", one)
        await client.request("branch.select", session=session, message=user)
        await client.settle()
        assert mirror.leaf == two
        ack = await client.request("message.regenerate", session=session, message=one)
        await client.ended(session, ack["reply"])
        assert mirror.children(root) == [one, ack["reply"]]
        assert mirror.leaf == ack["reply"]
        await client.request("branch.select", session=session, message=one)
        await client.settle()
        assert mirror.leaf == two, "the fork below keeps its last choice"
        mirror.check()


async def test_edit_makes_a_sibling_of_the_user_message_with_a_reply(connect: Connect) -> None:
    async with connect() as client:
        session, mirror = await client.started_session(params={"max_tokens": 3})
        root, _ = await client.turn(session, "root")
        ack = await client.request("message.edit", session=session, message=root, text="better root")
        await client.ended(session, ack["reply"])
        assert mirror.children(None) == [root, ack["message"]]
        assert mirror.messages[root]["text"] == "root"
        assert mirror.leaf == ack["reply"]


async def test_continue_goes_on_with_the_same_message(connect: Connect) -> None:
    async with connect() as client:
        session, mirror = await client.started_session(params={"temperature": 0})
        _, whole = await client.turn(session, "go", max_tokens=20)
        message = mirror.messages[whole]["parent"]
        ack = await client.request("message.regenerate", session=session, message=message, params={"max_tokens": 12})
        part = ack["reply"]
        await client.ended(session, part)
        before = mirror.messages[part]["text"]
        ack = await client.request("message.continue", session=session, message=part, params={"max_tokens": 8})
        assert ack["reply"] == part
        end = await client.ended(session, part, times=2)
        assert end["usage"]["completion_tokens"] == 8
        assert mirror.messages[part]["text"].startswith(before)
        assert mirror.messages[part]["text"] == mirror.messages[whole]["text"]
        assert len(mirror.children(message)) == 2
        await client.turn(session, "more", part, max_tokens=1)
        with pytest.raises(RequestFailedError, match="conflict"):
            await client.request("message.continue", session=session, message=part)


async def test_delete_takes_the_subtree_and_the_leaf_moves_to_a_living_message(connect: Connect) -> None:
    async with connect() as client:
        session, mirror = await client.started_session(params={"max_tokens": 2})
        _, one = await client.turn(session, "root")
        user, two = await client.turn(session, "next", one)
        await client.turn(session, "deeper", two)
        ack = await client.request("message.delete", session=session, message=user)
        assert ack["deleted"] == 4
        await client.settle()
        assert mirror.leaf == one
        assert len(mirror.messages) == 2
        root = mirror.messages[one]["parent"]
        assert (await client.request("message.delete", session=session, message=root))["deleted"] == 2
        await client.until(lambda: mirror.leaf is None)
        await client.turn(session, "afresh")


async def test_deleting_what_is_being_generated_ends_it_once(connect: Connect) -> None:
    async with connect() as client:
        session, mirror = await client.started_session()
        user, reply = await client.say(session, "long", max_tokens=3000)
        await client.until(lambda: bool(mirror.messages.get(reply, {}).get("text")))
        await client.request("message.delete", session=session, message=user)
        await client.until(lambda: not mirror.messages)
        assert [e["reason"] for e in mirror.ended[reply]] == ["cancelled"]


async def test_siblings_generate_at_once_and_busy_is_for_the_message_itself(connect: Connect) -> None:
    async with connect() as client:
        session, mirror = await client.started_session()
        message, reply = await client.say(session, "long", max_tokens=3000)
        ack = await client.request("message.regenerate", session=session, message=message, params={"max_tokens": 3000})
        await client.until(lambda: all(mirror.messages.get(r, {}).get("text") for r in (reply, ack["reply"])))
        for request, fields in (
            ("message.send", {"parent": reply, "text": "too soon"}),
            ("message.continue", {"message": reply}),
        ):
            with pytest.raises(RequestFailedError, match="busy"):
                await client.request(request, session=session, **fields)
        for running in (reply, ack["reply"]):
            await client.request("generation.stop", session=session, message=running)
            assert mirror.ended[running], "the ack of stop comes after generation.end"
        await client.request("generation.stop", session=session, message=reply)


@pytest.mark.parametrize(
    ("request_type", "fields", "code"),
    [
        ("message.send", {"parent": "USER", "text": "x"}, "bad_params"),
        ("message.send", {"parent": "nobody", "text": "x"}, "not_found"),
        ("message.edit", {"message": "REPLY", "text": "x"}, "bad_params"),
        ("message.continue", {"message": "USER"}, "bad_params"),
        ("message.regenerate", {"message": "nobody"}, "not_found"),
        ("message.delete", {"message": "nobody"}, "not_found"),
        ("branch.select", {"message": "nobody"}, "not_found"),
        ("generation.stop", {"message": "nobody"}, "not_found"),
        ("session.fork", {"message": "nobody"}, "not_found"),
        ("message.send", {"parent": None, "text": 7}, "bad_params"),
        ("message.send", {"parent": None}, "bad_frame"),
    ],
)
async def test_requests_that_name_the_wrong_thing_create_nothing(
    connect: Connect, request_type: str, fields: dict[str, object], code: str
) -> None:
    async with connect() as client:
        session, mirror = await client.started_session()
        user, reply = await client.turn(session, "root", max_tokens=1)
        seq = mirror.seq
        filled = {k: {"USER": user, "REPLY": reply}.get(str(v), v) for k, v in fields.items()}
        with pytest.raises(RequestFailedError) as failed:
            await client.request(request_type, session=session, **filled)
        assert failed.value.code == code
        await client.settle()
        assert mirror.seq == seq


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", False),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("presence_penalty", -3),
        ("frequency_penalty", 3),
        ("stop", "not a list"),
        ("stop", ["x"] * 9),
        ("stop", [""]),
        ("stop", [1]),
        ("seed", -1),
        ("seed", 0.5),
    ],
)
async def test_a_param_out_of_range_is_named_with_what_was_given(connect: Connect, name: str, value: object) -> None:
    async with connect() as client:
        session, mirror = await client.started_session()
        with pytest.raises(RequestFailedError, match="bad_params") as failed:
            await client.say(session, "x", **{name: value})
        detail = failed.value.frame["detail"]
        assert name in detail
        assert repr(value)[:20] in detail
        for request in ("session.create", "session.update"):
            fields = {"session": session} if request == "session.update" else {}
            with pytest.raises(RequestFailedError, match="bad_params"):
                await client.request(request, params={name: value}, **fields)
        assert not mirror.messages
