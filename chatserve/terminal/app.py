"""`chatserve chat`: the person's side of the terminal client.

Owns the commands and what is printed; the connection and the conversation's state are the client's.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from chatserve.terminal.client import ChatClient, NotConnectedError, ServerError
from chatserve.terminal.commands import COMMANDS, CommandError, whole_number
from chatserve.terminal.lines import Lines, Output, PipedLines, TerminalLines
from chatserve.terminal.view import Message, SessionView


class ChatApp:
    """One run of the terminal client over an open `client`."""

    def __init__(self, client: ChatClient, lines: Lines, output: Output) -> None:
        self.client = client
        self._lines = lines
        self.output = output
        self.view: SessionView | None = None
        self.listed: list[str] = []
        """Session ids as `/sessions` last numbered them."""
        self._quit = False
        self._failed = False

    async def run(self, session: str | None = None) -> int:
        """Read and do lines until the end of input or /quit; the exit code."""
        if session is not None:
            await self._attempt(self.switch(session))
        if self._lines.interactive:
            self.output.note(f"{self.client.welcome.get('model', 'chat')} · /help lists the commands, /quit leaves")
        while not self._quit:
            try:
                line = await self._lines.read()
            except KeyboardInterrupt:
                self.output.note("/quit or Ctrl-D leaves")
                continue
            if line is None:
                break
            await self._attempt(self._do(line))
        return int(self._failed and not self._lines.interactive)

    def quit(self) -> None:
        """Leave after this line."""
        self._quit = True

    async def _attempt(self, doing: Awaitable[None]) -> None:
        try:
            await doing
        except (ServerError, CommandError) as error:
            self._failed = True
            self.output.error(str(error))

    async def _do(self, line: str) -> None:
        if not line.strip():
            return
        if not line.startswith("/") or line.startswith("//"):
            await self._say(line.removeprefix("/") if line.startswith("//") else line)
            return
        name, _, argument = line[1:].partition(" ")
        if name not in COMMANDS:
            raise CommandError(f"there is no command /{name}; /help lists them (// starts a message with a slash)")
        await COMMANDS[name].run(self, argument.strip())

    # --- conversations ---

    async def opened(self) -> SessionView:
        """The open conversation, made first where there is none."""
        if self.view is not None and self.view.deleted:
            self.view = None
            self.output.note("that conversation was deleted; this is a new one")
        if self.view is None:
            made = await self.client.request("session.create")
            self.view = await self.client.open(made["session"])
        return self.view

    async def switch(self, session: str) -> None:
        view = await self.client.open(session)
        if self.view is not None and self.view.session != session:
            await self.client.leave(self.view.session)
        self.view = view
        self.output.note(f"{view.title or 'Untitled'} ({session})")
        await self.history()

    async def history(self) -> None:
        for index, each in enumerate((await self.opened()).path(), start=1):
            if each.status == "generating":
                await self._watch(each.message)
                return
            self.output.note(f"{index} {each.role}{self._place(each)}")
            self.output.text(f"{each.text}\n")

    def _place(self, message: Message) -> str:
        assert self.view is not None
        siblings = self.view.siblings(message.message)
        return f" ({siblings.index(message) + 1} of {len(siblings)})" if len(siblings) > 1 else ""

    async def message(self, argument: str, role: str | None = None) -> Message:
        """The message of the active path that the person numbered, or the last one (of a role)."""
        view = await self.opened()
        path = view.path()
        if argument:
            index = whole_number(argument)
            if not 1 <= index <= len(path):
                raise CommandError(f"the conversation has messages 1 to {len(path)}; /history shows them")
            return path[index - 1]
        last = view.last(role) if role else path[-1] if path else None
        if last is None:
            raise CommandError("there is no such message yet")
        return last

    # --- answers ---

    async def _say(self, text: str) -> None:
        view = await self.opened()
        leaf = view.messages[view.leaf] if view.leaf else None
        # An answer that was deleted leaves its question as the leaf: a new question goes beside that one.
        parent = leaf.parent if leaf and leaf.role == "user" else view.leaf
        made = await self.client.request("message.send", session=view.session, parent=parent, text=text)
        await self._watch(made["reply"])

    async def ask(self, kind: str, message: str, **fields: Any) -> None:
        """A request whose ack names a reply, which is then shown."""
        view = await self.opened()
        made = await self.client.request(kind, session=view.session, message=message, **fields)
        await self._watch(made["reply"])

    async def go_on(self, message: Message) -> None:
        """Continue an answer that has ended, and show what is added."""
        view = await self.opened()
        before = dataclasses.replace(message)
        await self.client.request("message.continue", session=view.session, message=before.message)
        # It stands there as ended until the first event of its continuation.
        await self.client.wait_for(lambda: view.messages.get(before.message) != before)
        await self._watch(before.message, len(before.text))

    async def _watch(self, reply: str, shown: int = 0) -> None:
        """Print an answer as it comes, over reconnects, until it ends; Ctrl-C stops it, or while there is no connection
        the waiting for it.
        """
        view = await self.opened()
        started = False
        with self._stopping_on_interrupt(view.session, reply):
            while True:
                message = view.messages.get(reply)
                if message is not None and len(message.text) > shown:
                    self.output.text(message.text[shown:])
                    shown = len(message.text)
                started = started or (message is not None and message.status == "generating")
                if view.deleted or (message is None and started):
                    self.output.note("(deleted)")
                    return
                if message is not None and message.status != "generating":
                    break
                if not self.client.connected:
                    self.output.note("(connection lost; connecting again)")
                    await self.client.wait_for(lambda: self.client.connected)
                await self.client.wait_for(self._something_new(view, reply, shown))
        self.output.text("\n")
        receipt = _receipt(message)
        if receipt and self._lines.interactive:
            self.output.note(receipt + self._place(message))
        elif message.status != "done":
            self.output.note(f"({message.status})")

    def _something_new(self, view: SessionView, reply: str, shown: int) -> Callable[[], bool]:
        known = reply in view.messages

        def new() -> bool:
            message = view.messages.get(reply)
            if message is None:
                return known or view.deleted or not self.client.connected
            return len(message.text) > shown or message.status != "generating" or not self.client.connected

        return new

    @contextlib.contextmanager
    def _stopping_on_interrupt(self, session: str, message: str) -> Iterator[None]:
        loop, watching = asyncio.get_running_loop(), asyncio.current_task()
        assert watching is not None
        stops: set[asyncio.Task[None]] = set()
        left = False

        async def ask() -> None:
            with contextlib.suppress(ServerError, NotConnectedError):
                await self.client.request("generation.stop", session=session, message=message)

        def interrupted() -> None:
            nonlocal left
            if self.client.connected:
                stops.add(loop.create_task(ask()))
            elif not left:
                left = True
                watching.cancel()

        loop.add_signal_handler(signal.SIGINT, interrupted)
        try:
            yield
        except asyncio.CancelledError:
            if not left:
                raise
            watching.uncancel()
            raise CommandError("there is no connection; /history shows the answer when there is one again") from None
        finally:
            loop.remove_signal_handler(signal.SIGINT)


def _receipt(message: Message) -> str:
    """What the answer cost, in a line; empty where it never started."""
    usage = message.usage
    if "prompt_tokens" not in usage:
        return ""
    said = "" if message.status == "done" else f"{message.status} · "
    parts = {"cached": "cached_tokens", "swapped in": "swapped_in_tokens", "computed": "computed_tokens"}
    said += " · ".join(f"{usage[field]} {what}" for what, field in parts.items())
    if usage.get("ttft_ms") is not None:
        said += f" · first token {usage['ttft_ms'] / 1000:.2f} s"
    if usage.get("tokens_per_s") is not None:
        said += f" · {usage['tokens_per_s']:.0f} tokens/s"
    return said


async def _main(url: str, token: str | None, session: str | None) -> int:
    lines: Lines = TerminalLines() if sys.stdin.isatty() else PipedLines()
    output = Output()
    try:
        async with ChatClient(url, token=token) as client:
            return await ChatApp(client, lines, output).run(session)
    except NotConnectedError as error:
        output.error(f"chatserve: {error}" + (f"; {error.advice}" if error.advice else ""))
        return 1


def run(url: str, *, token: str | None = None, session: str | None = None) -> int:
    """Run the client on this process's terminal or pipes; the exit code."""
    try:
        return asyncio.run(_main(url, token, session))
    except KeyboardInterrupt:
        return 130
