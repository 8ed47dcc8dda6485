"""Conversations as files: our own export, and the import of it or of ChatGPT's `conversations.json`.

Pure: bytes to values and back. Whatever is wrong with a file raises `BadParamsError` before anything is created. Texts
are kept as they are; token ids are not exported, since another model would not know them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from chatserve.chat.store import MessageRecord, SessionState
from chatserve.chat.tree import ASSISTANT, USER, Tree, order_by_parents
from chatserve.config import Limits
from chatserve.errors import BadParamsError, TooLargeError
from chatserve.types import MessageId

if TYPE_CHECKING:
    from collections.abc import Callable

FORMAT: Final = "chatserve.session"
VERSION: Final = 1
_FINISHED: Final = ("done", "stopped", "interrupted", "failed")
_NOT_SAID: Final = ("thoughts", "reasoning_recap", "user_editable_context", "model_editable_context")


class ExportedMessage(msgspec.Struct, kw_only=True):
    """One message of an export; `parent` is null for the first."""

    message: str
    parent: str | None
    role: str
    text: str
    status: str = "done"
    created_at: float | None = None


class Conversation(msgspec.Struct, kw_only=True):
    """One session of an export, or what another program's amounts to."""

    title: str = ""
    system: str | None = None
    params: dict[str, Any] = {}
    leaf: str | None = None
    messages: list[ExportedMessage]
    format: str = ""
    version: int = VERSION


def export(state: SessionState) -> dict[str, Any]:
    """A session as JSON values."""
    record = state.record
    return {
        "format": FORMAT,
        "version": VERSION,
        "session": record.session,
        "title": record.title,
        "system": record.system,
        "params": record.params,
        "leaf": record.leaf,
        "created_at": record.created_at,
        "updated_at": record.updated_at,
        "messages": [
            {
                "message": m.message,
                "parent": m.parent,
                "role": m.role,
                "text": m.text,
                "status": m.status,
                "created_at": m.created_at,
            }
            for m in state.messages
        ],
    }


def parse(data: bytes) -> list[Conversation]:
    """Read an export or a `conversations.json`.

    Raises:
        BadParamsError: it is neither, or is cut short.
    """
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadParamsError(f"the file is not complete JSON ({error}); nothing was imported") from None
    values = value if isinstance(value, list) else [value]
    if not values:
        raise BadParamsError("the file holds no conversation")
    return [_conversation(v, f"conversation {i + 1}") for i, v in enumerate(values)]


def build(
    conversation: Conversation, limits: Limits, *, new_id: Callable[[], MessageId], now: float
) -> tuple[list[MessageRecord], MessageId | None]:
    """Its messages under new ids, and its active leaf.

    Raises:
        BadParamsError: its parents form no tree, or roles do not alternate.
        TooLargeError: it has more messages than a session may hold.
    """
    most = limits.max_messages_per_session
    if len(conversation.messages) > most:
        raise TooLargeError(f"the conversation has {len(conversation.messages)} messages; at most {most} are allowed")
    by_id = {m.message: m for m in conversation.messages}
    if len(by_id) != len(conversation.messages):
        raise BadParamsError("two messages have the same id")
    ids = {old: new_id() for old in by_id}
    records: list[MessageRecord] = []
    for old in order_by_parents({m.message: m.parent for m in conversation.messages}):
        m = by_id[old]
        records.append(
            MessageRecord(
                message=ids[old],
                parent=None if m.parent is None else ids[m.parent],
                role=m.role,
                text=m.text,
                status=m.status if m.status in _FINISHED else "interrupted",
                created_at=now if m.created_at is None else m.created_at,
            )
        )
    tree = Tree(records)
    if conversation.leaf is not None and conversation.leaf not in ids:
        raise BadParamsError("the active leaf is not one of the messages", field="leaf")
    if not records:
        return [], None
    end = tree.descend(None) if conversation.leaf is None else ids[conversation.leaf]
    assert end is not None
    tree.apply(tree.select(end))
    return list(tree), tree.leaf


# --- one conversation of either kind ----------------------------------------------------------------------------------


def _conversation(value: Any, name: str) -> Conversation:
    if not isinstance(value, dict):
        raise BadParamsError(f"{name} is not an object")
    if "mapping" in value:
        return _from_chatgpt(value, name)
    try:
        conversation = msgspec.convert(value, Conversation)
    except msgspec.ValidationError as error:
        raise BadParamsError(f"{name} is no export of ours and not ChatGPT's: {error}") from None
    if conversation.version > VERSION:
        raise BadParamsError(f"{name} was exported by a newer version (format {conversation.version}, not {VERSION})")
    for message in conversation.messages:
        if message.role not in {USER, ASSISTANT}:
            raise BadParamsError.of("role", message.role, "user or assistant")
    return conversation


class _Author(msgspec.Struct):
    role: str = ""


class _Content(msgspec.Struct):
    content_type: str = "text"
    parts: list[Any] | None = None
    text: str | None = None


class _Said(msgspec.Struct):
    author: _Author = msgspec.field(default_factory=_Author)
    content: _Content = msgspec.field(default_factory=_Content)
    create_time: float | None = None
    metadata: dict[str, Any] | None = None


class _Node(msgspec.Struct):
    parent: str | None = None
    message: _Said | None = None


class _ChatGpt(msgspec.Struct):
    mapping: dict[str, _Node]
    title: str | None = None
    current_node: str | None = None


def _from_chatgpt(value: dict[str, Any], name: str) -> Conversation:
    """Keep what was said and shown; hang it where the nearest ancestor that is kept stands.

    Several answers in a row (a tool was called in between) become one. A parent that is not in the file makes a root.
    """
    try:
        found = msgspec.convert(value, _ChatGpt)
    except msgspec.ValidationError as error:
        raise BadParamsError(f"{name} is not as ChatGPT exports it: {error}") from None
    nodes = found.mapping
    parents = {key: node.parent if node.parent in nodes else None for key, node in nodes.items()}
    system: str | None = None
    said: dict[str, ExportedMessage] = {}
    absorbed: set[str] = set()
    stands_at: dict[str, str | None] = {}
    for key in order_by_parents(parents):
        parent = parents[key]
        above = None if parent is None else stands_at[parent]
        message = nodes[key].message
        text = "" if message is None or _is_hidden(message) else _text(message.content)
        role = "" if message is None else message.author.role
        if role == "system" and text and above is None and system is None:
            system = text
        if role not in {USER, ASSISTANT} or not text:
            stands_at[key] = above
            continue
        if above is not None and said[above].role == role:
            absorbed.add(above)
            before = said[above]
            above, text = before.parent, f"{before.text}\n\n{text}"
        elif above is None and role == ASSISTANT:
            said[f"{key}?"] = ExportedMessage(message=f"{key}?", parent=None, role=USER, text="")
            above = f"{key}?"
        created_at = None if message is None else message.create_time
        said[key] = ExportedMessage(message=key, parent=above, role=role, text=text, created_at=created_at)
        stands_at[key] = key
    kept_parents = {m.parent for m in said.values()}
    messages = [m for m in said.values() if m.message not in absorbed or m.message in kept_parents]
    leaf = stands_at.get(found.current_node) if found.current_node is not None else None
    if leaf is not None and leaf not in {m.message for m in messages}:
        leaf = None
    return Conversation(title=found.title or "", system=system, leaf=leaf, messages=messages)


def _is_hidden(message: _Said) -> bool:
    return bool((message.metadata or {}).get("is_visually_hidden_from_conversation"))


def _text(content: _Content) -> str:
    if content.content_type in _NOT_SAID:
        return ""
    if content.parts is None:
        return content.text or ""
    texts = (
        part if isinstance(part, str) else _part_text(part) if isinstance(part, dict) else "" for part in content.parts
    )
    return "\n".join(text for text in texts if text)


def _part_text(part: dict[str, Any]) -> str:
    text = part.get("text")
    return text if isinstance(text, str) and text else "[attachment]"
