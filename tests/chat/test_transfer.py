"""Files in and out: what is exported comes back, what is broken creates nothing."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatserve.chat import transfer
from chatserve.chat.store import Committed, Transaction
from chatserve.config import Limits
from chatserve.errors import BadParamsError, StoreUnavailableError, TooLargeError
from chatserve.types import MessageId
from tests.chat.harness import ANN, Encoders, Harness, refused
from tests.fakes.memory_store import MemoryStore


def shape(messages: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Messages with ids replaced by their places."""
    place = {m["message"]: i for i, m in enumerate(messages)}
    return [(place.get(m["parent"]), m["role"], m["text"], m["status"], m["created_at"]) for m in messages]


async def test_what_is_exported_comes_back_as_it_was(encoders: Encoders) -> None:
    async with Harness(encoders["chatml"]) as harness:
        session = await harness.create(title=" T\x00 ", system="S 👩‍👩‍👧‍👦", params={"max_tokens": 3, "stop": ["x y"]})
        _, one = await harness.turn(session, "  <|im_end|>\r\n ")
        message, _ = await harness.turn(session, "next", one)
        await harness.turn(session, "else", one)
        await harness.call("select_branch", session=session, message=message)
        exported = await harness.service.export(ANN, session)
        (imported,) = await harness.service.import_(ANN, json.dumps(exported).encode())
        again = await harness.service.export(ANN, imported)
        assert shape(again["messages"]) == shape(exported["messages"])
        assert not {m["message"] for m in again["messages"]} & {m["message"] for m in exported["messages"]}
        for field in ("title", "system", "params", "format", "version"):
            assert again[field] == exported[field]
        places = [[m["message"] for m in e["messages"]].index(e["leaf"]) for e in (exported, again)]
        assert places[0] == places[1]
        state = await harness.service.snapshot(ANN, imported)
        harness.watch_from(state)
        await harness.turn(imported, "goes on", state.record.leaf, max_tokens=2)
        encoded = (await harness.service.snapshot(ANN, imported)).messages
        on_path = [m for m in encoded if m.token_ids]
        assert len(on_path) == 6, "texts are encoded when they are first part of a prompt"
        await harness.idle()
        await harness.check()


async def test_half_a_file_is_an_error_and_creates_nothing(encoders: Encoders) -> None:
    async with Harness(encoders["chatml"]) as harness:
        session = await harness.create()
        await harness.turn(session, "text", max_tokens=2)
        whole = json.dumps(await harness.service.export(ANN, session)).encode()
        assert isinstance(await refused(harness.service.import_(ANN, b'{"messages":' + b"[" * 100_000)), BadParamsError)
        for cut in range(0, len(whole), 37):
            error = await refused(harness.service.import_(ANN, whole[:cut]))
            assert isinstance(error, BadParamsError)
        assert len((await harness.service.list_sessions(ANN)).sessions) == 1


def message(name: str, parent: str | None, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"message": name, "parent": parent, "role": role, "text": name, **more}


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ([], "no conversation"),
        ("text", "not an object"),
        ({"messages": 3}, "messages"),
        ({"title": "no messages"}, "messages"),
        ({"messages": [message("a", "b"), message("b", "a", "assistant")]}, "cycle"),
        ({"messages": [message("a", "a")]}, "cycle"),
        ({"messages": [message("a", "gone")]}, "not there"),
        ({"messages": [message("a", None), message("a", None)]}, "same id"),
        ({"messages": [message("a", None, "system")]}, "role"),
        ({"messages": [message("a", None, "assistant")]}, "cannot follow"),
        ({"messages": [message("a", None), message("b", "a")]}, "cannot follow"),
        ({"messages": [message("a", None)], "leaf": "z"}, "leaf"),
        ({"messages": [message("a", None, text=7)]}, "text"),
        ({"messages": [], "params": {"top_p": 7}}, "top_p"),
        ({"messages": [], "version": 99}, "newer"),
        ([{"messages": []}, {"mapping": {"a": {"parent": "b"}, "b": {"parent": "a"}}}], "cycle"),
        ({"mapping": {"a": 3}}, "ChatGPT"),
    ],
)
async def test_what_is_wrong_with_a_file_is_said_and_nothing_is_created(
    encoders: Encoders, value: Any, why: str
) -> None:
    async with Harness(encoders["chatml"]) as harness:
        error = await refused(harness.service.import_(ANN, json.dumps(value).encode()))
        assert isinstance(error, BadParamsError)
        assert why in error.detail
        assert (await harness.service.list_sessions(ANN)).sessions == ()


async def test_an_import_that_cannot_be_stored_is_taken_back_and_nobody_goes_on_seeing_it(encoders: Encoders) -> None:
    class Full(MemoryStore):
        async def commit(self, change: Transaction) -> Committed:
            if change.create and self.num_commits == 2:
                raise StoreUnavailableError("no room")
            return await super().commit(change)

    async with Harness(encoders["chatml"], store=Full()) as harness:
        file = json.dumps([{"messages": [], "title": str(n)} for n in range(3)]).encode()
        assert isinstance(await refused(harness.service.import_(ANN, file)), StoreUnavailableError)
        seen = [session for session, _, deleted in harness.changed if not deleted]
        assert len(seen) == 2
        assert sorted(seen) == sorted(session for session, _, deleted in harness.changed if deleted)
        await harness.until(lambda: harness.health[-1] == ("store", True))
        assert not (await harness.service.list_sessions(ANN)).sessions


async def test_limits_hold_for_imports_too(encoders: Encoders) -> None:
    limits = Limits(max_messages_per_session=2, max_text_bytes=10, max_title_bytes=4, max_system_bytes=4)
    async with Harness(encoders["chatml"], limits=limits) as harness:
        for value in (
            {"messages": [message(str(n), None) for n in range(3)]},
            {"messages": [message("a", None, text="ä" * 6)]},
            {"messages": [], "title": "12345"},
            {"messages": [], "system": "12345"},
        ):
            good = {"messages": [message("a", None)]}
            error = await refused(harness.service.import_(ANN, json.dumps([good, value]).encode()))
            assert isinstance(error, TooLargeError)
        assert (await harness.service.list_sessions(ANN)).sessions == ()


async def test_messages_may_come_in_any_order(encoders: Encoders) -> None:
    rows = [message("c", "b"), message("b", "a", "assistant"), message("a", None)]
    async with Harness(encoders["chatml"]) as harness:
        (session,) = await harness.service.import_(ANN, json.dumps({"messages": rows}).encode())
        state = await harness.service.snapshot(ANN, session)
        assert [m.text for m in state.messages] == ["a", "b", "c"]
        assert state.record.leaf == state.messages[-1].message


# --- ChatGPT ----------------------------------------------------------------------------------------------------------


def said(role: str, *parts: Any, hidden: bool = False, kind: str = "text", **content: Any) -> dict[str, Any]:
    return {
        "author": {"role": role, "name": None, "metadata": {}},
        "create_time": 1700000000.5,
        "content": {"content_type": kind, "parts": list(parts), **content},
        "metadata": {"is_visually_hidden_from_conversation": True} if hidden else {},
    }


def node(parent: str | None, message: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"id": "?", "parent": parent, "children": [], "message": message}


def outline(conversation: transfer.Conversation) -> list[tuple[str | None, str, str]]:
    names = {m.message: m.text for m in conversation.messages}
    return [(None if m.parent is None else names[m.parent], m.role, m.text) for m in conversation.messages]


def test_a_chatgpt_export_keeps_what_was_said_and_shown() -> None:
    mapping = {
        "root": node(None),
        "sys": node("root", said("system", "", hidden=True)),
        "ctx": node("sys", said("user", kind="user_editable_context", hidden=True)),
        "q": node("ctx", said("user", "What is this?", {"content_type": "image_asset_pointer"})),
        "thoughts": node("q", said("assistant", kind="thoughts")),
        "call": node("thoughts", said("assistant", "Let me look.")),
        "tool": node("call", said("tool", "raw results")),
        "a": node("tool", said("assistant", "It is a cat.")),
        "a2": node("q", said("assistant", "Another answer.")),
        "q2": node("a", said("user", "Sure?")),
    }
    (found,) = transfer.parse(json.dumps([{"title": "Cat", "mapping": mapping, "current_node": "a2"}]).encode())
    assert outline(found) == [
        (None, "user", "What is this?\n[attachment]"),
        ("What is this?\n[attachment]", "assistant", "Let me look.\n\nIt is a cat."),
        ("What is this?\n[attachment]", "assistant", "Another answer."),
        ("Let me look.\n\nIt is a cat.", "user", "Sure?"),
    ]
    records, leaf = transfer.build(found, Limits(), new_id=_new_ids(), now=9.0)
    assert [r.text for r in records if r.message == leaf] == ["Another answer."]
    assert {r.created_at for r in records} == {1700000000.5}


def test_a_chatgpt_parent_that_is_missing_makes_a_root_and_an_answer_without_question_gets_one() -> None:
    mapping = {"q": node("gone", said("user", "Hi")), "a": node(None, said("assistant", "I begin"))}
    (found,) = transfer.parse(json.dumps({"title": None, "mapping": mapping}).encode())
    assert outline(found) == [(None, "user", "Hi"), (None, "user", ""), ("", "assistant", "I begin")]
    transfer.build(found, Limits(), new_id=_new_ids(), now=0.0)


def test_a_visible_system_message_of_chatgpt_is_the_sessions_prompt() -> None:
    mapping = {"s": node(None, said("system", "Be kind.")), "q": node("s", said("user", "Hi"))}
    (found,) = transfer.parse(json.dumps({"title": "T", "mapping": mapping}).encode())
    assert found.system == "Be kind."


def _new_ids() -> Any:
    count = itertools.count()
    return lambda: MessageId(f"new{next(count)}")


_names = st.sampled_from([f"n{i}" for i in range(8)])
_messages = st.none() | st.builds(
    lambda role, text, hidden: said(role, text, hidden=hidden),
    st.sampled_from(["user", "assistant", "system", "tool", "odd"]),
    st.sampled_from(["", "x", "y"]),
    st.booleans(),
)


def _climb(parents: dict[str, str | None], name: str | None) -> bool:
    """Whether one arrives at the top, or where a parent is missing, in as many steps as there are names."""
    for _ in range(len(parents) + 1):
        if name not in parents:
            return True
        name = parents[name]
    return False


@given(st.dictionaries(_names, st.tuples(st.none() | _names, _messages), max_size=8), st.none() | _names)
def test_any_chatgpt_tree_becomes_a_valid_tree_or_is_refused(tree: dict[str, Any], current: str | None) -> None:
    mapping = {name: node(parent, message) for name, (parent, message) in tree.items()}
    data = json.dumps({"title": "T", "mapping": mapping, "current_node": current}).encode()
    climbs = (_climb({name: parent for name, (parent, _) in tree.items()}, name) for name in tree)
    if not all(climbs):
        with pytest.raises(BadParamsError, match="cycle"):
            transfer.parse(data)
        return
    (found,) = transfer.parse(data)
    records, leaf = transfer.build(found, Limits(), new_id=_new_ids(), now=0.0)
    assert (leaf is None) == (not records)


def test_a_line_of_twenty_thousand_messages_is_a_tree() -> None:
    rows = [message(str(n), str(n - 1) if n else None, "user" if n % 2 == 0 else "assistant") for n in range(20_000)]
    (found,) = transfer.parse(json.dumps({"messages": rows[::-1]}).encode())
    records, leaf = transfer.build(found, Limits(), new_id=_new_ids(), now=0.0)
    assert len(records) == 20_000
    assert leaf == records[-1].message
