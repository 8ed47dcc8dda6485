"""The commands of `chatserve chat`, one function each.

Each gets the app and the rest of its line. They ask the server and let the app show what came of it.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from chatserve.terminal.lines import printable

if TYPE_CHECKING:
    from chatserve.terminal.app import ChatApp

_PREVIEW_CHARS: Final = 70


class CommandError(Exception):
    """The person asked for what cannot be done; the message says why."""


Handler = Callable[["ChatApp", str], Awaitable[None]]


class Command(NamedTuple):
    run: Handler
    arguments: str
    about: str


COMMANDS: dict[str, Command] = {}


def _command(name: str, arguments: str, about: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        COMMANDS[name] = Command(handler, arguments, about)
        return handler

    return register


@_command("help", "", "this list")
async def _help(app: ChatApp, _: str) -> None:
    usages = {f"/{name} {command.arguments}": command.about for name, command in COMMANDS.items()}
    width = max(map(len, usages))
    for usage, about in usages.items():
        app.output.note(f"{usage:{width}}  {about}")


@_command("regenerate", "[N]", "another answer beside the last one (or beside message N)")
async def _regenerate(app: ChatApp, argument: str) -> None:
    message = await app.message(argument, "assistant" if not argument else None)
    await app.ask("message.regenerate", message.message)


@_command("edit", "TEXT", "put the last question differently, on a new branch")
async def _edit(app: ChatApp, argument: str) -> None:
    if not argument:
        raise CommandError("/edit needs the new text")
    await app.ask("message.edit", (await app.message("", "user")).message, text=argument)


@_command("continue", "", "let the last answer go on")
async def _continue(app: ChatApp, _: str) -> None:
    await app.go_on(await app.message("", "assistant"))


@_command("branch", "[[N] K]", "list the alternatives; choose the Kth (of message N)")
async def _branch(app: ChatApp, argument: str) -> None:
    view = await app.opened()
    path = view.path()
    forks = [index for index, each in enumerate(path) if len(view.siblings(each.message)) > 1]
    words = argument.split()
    if not forks:
        raise CommandError("the conversation has one branch; /regenerate or /edit makes another")
    if not words:
        for index in forks:
            app.output.note(f"message {index + 1} ({path[index].role})")
            for place, each in enumerate(view.siblings(path[index].message), start=1):
                app.output.note(f"  {'*' if each is path[index] else ' '} {place} {_preview(each.text)}")
        return
    at = path[forks[-1]] if len(words) == 1 else await app.message(words[0])
    siblings = view.siblings(at.message)
    place = whole_number(words[-1])
    if not 1 <= place <= len(siblings):
        raise CommandError(f"that message has alternatives 1 to {len(siblings)}")
    await app.client.request("branch.select", session=view.session, message=siblings[place - 1].message)
    chosen = siblings[place - 1]
    await app.client.wait_for(lambda: chosen in view.path())
    await app.history()


@_command("delete", "[N]", "delete the last message (or message N) and all below it")
async def _delete(app: ChatApp, argument: str) -> None:
    view = await app.opened()
    message = await app.message(argument)
    gone = await app.client.request("message.delete", session=view.session, message=message.message)
    await app.client.wait_for(lambda: message.message not in view.messages)
    app.output.note(f"deleted {gone['deleted']}")


@_command("fork", "[N]", "go on in a new conversation that ends at the last message (or message N)")
async def _fork(app: ChatApp, argument: str) -> None:
    view = await app.opened()
    message = await app.message(argument)
    made = await app.client.request("session.fork", session=view.session, message=message.message)
    await app.switch(made["session"])


@_command("history", "", "show the conversation with its numbers")
async def _show(app: ChatApp, _: str) -> None:
    await app.history()


@_command("sessions", "[QUERY]", "list the conversations; /open N opens one")
async def _sessions(app: ChatApp, argument: str) -> None:
    listed = await app.client.request("session.list", **({"query": argument} if argument else {}))
    app.listed = [each["session"] for each in listed["sessions"]]
    for index, each in enumerate(listed["sessions"], start=1):
        mark = "*" if app.view is not None and each["session"] == app.view.session else " "
        app.output.note(f"{mark} {index} {_preview(each['title'] or 'Untitled')} ({each['messages']} messages)")


@_command("open", "N|ID", "open a conversation of the list")
async def _open(app: ChatApp, argument: str) -> None:
    if not argument:
        raise CommandError("/open needs a number of /sessions or an id")
    if argument.isdecimal() and 1 <= int(argument) <= len(app.listed):
        argument = app.listed[int(argument) - 1]
    await app.switch(argument)


@_command("new", "[TITLE]", "begin a new conversation")
async def _new(app: ChatApp, argument: str) -> None:
    made = await app.client.request("session.create", **({"title": argument} if argument else {}))
    await app.switch(made["session"])


@_command("title", "TEXT", "name the conversation")
async def _title(app: ChatApp, argument: str) -> None:
    await app.client.request("session.update", session=(await app.opened()).session, title=argument)


@_command("system", "[TEXT]", "show or set the system prompt")
async def _system(app: ChatApp, argument: str) -> None:
    view = await app.opened()
    if not argument:
        app.output.note(view.system or "(no system prompt)")
        return
    await app.client.request("session.update", session=view.session, system=argument)


@_command("params", "[NAME=VALUE ...]", "show or set sampling parameters; NAME= takes one back")
async def _params(app: ChatApp, argument: str) -> None:
    view = await app.opened()
    if not argument:
        app.output.note(" ".join(f"{name}={json.dumps(value)}" for name, value in view.params.items()) or "(none)")
        return
    params = dict(view.params)
    for word in argument.split():
        name, equals, value = word.partition("=")
        if not equals:
            raise CommandError(f"{word}: write NAME=VALUE")
        params.pop(name, None)
        if value:
            params[name] = _value(value)
    await app.client.request("session.update", session=view.session, params=params)


@_command("quit", "", "leave")
async def _leave(app: ChatApp, _: str) -> None:
    app.quit()


def whole_number(word: str) -> int:
    if not word.isdecimal():
        raise CommandError(f"{word} is not a number")
    return int(word)


def _value(word: str) -> Any:
    try:
        # NaN and the infinities are no JSON: as words they get the server's sentence on what is allowed.
        return json.loads(word, parse_constant=str)
    except ValueError:
        return word


def _preview(text: str) -> str:
    line = " ".join(printable(text).split())
    return line if len(line) <= _PREVIEW_CHARS else f"{line[: _PREVIEW_CHARS - 1]}…"
