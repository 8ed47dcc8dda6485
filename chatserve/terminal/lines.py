"""Where a person's lines come from and where text goes: a terminal, or pipes.

Knows nothing of conversations.
"""

from __future__ import annotations

import asyncio
import io
import sys
import threading
from typing import Final, Protocol, TextIO

from prompt_toolkit import PromptSession
from rich.console import Console
from rich.markup import escape

# What a model or another person wrote must not move our cursor, set our title or paint over what was said.
_CONTROLS: Final = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """The text without control characters other than line breaks and tabs."""
    return text.translate(_CONTROLS)


class Lines(Protocol):
    """A source of input lines."""

    interactive: bool

    async def read(self) -> str | None:
        """The next line without its end; None at the end of input.

        Raises:
            KeyboardInterrupt: Ctrl-C at the prompt.
        """


class TerminalLines:
    """A prompt with history and editing."""

    interactive = True

    def __init__(self) -> None:
        self._prompt: PromptSession[str] = PromptSession("> ")

    async def read(self) -> str | None:
        try:
            return await self._prompt.prompt_async()
        except EOFError:
            return None


class PipedLines:
    """Standard input that is a pipe or a file. A thread reads it, for a file cannot be waited for otherwise."""

    interactive = False

    def __init__(self, source: TextIO = sys.stdin) -> None:
        if isinstance(source, io.TextIOWrapper):
            source.reconfigure(errors="replace")  # a byte that is no text must neither end the reading nor the sending
        self._source = source
        self._queue: asyncio.Queue[str | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._pump, daemon=True).start()

    def _pump(self) -> None:
        try:
            for line in self._source:
                self._loop.call_soon_threadsafe(self._queue.put_nowait, line.rstrip("\r\n"))
            self._loop.call_soon_threadsafe(self._queue.put_nowait, None)
        except RuntimeError:
            return  # the loop has ended before the input did

    async def read(self) -> str | None:
        return await self._queue.get()


class Output:
    """What is said by the model goes to standard output as it is; what we say of it, dimly, to standard error."""

    def __init__(self, out: TextIO = sys.stdout, console: Console | None = None) -> None:
        self._out = out
        self._console = console or Console(stderr=True, highlight=False)
        self._in_line = False
        """Text was written that does not end in a line break."""

    def text(self, text: str) -> None:
        shown = printable(text)
        if shown:
            self._in_line = not shown.endswith("\n")
        self._out.write(shown)
        self._out.flush()

    def note(self, text: str) -> None:
        """On a line of its own where both go to one terminal."""
        if self._in_line and self._out.isatty() and self._console.is_terminal:
            self.text("\n")
        self._console.print(f"[dim]{escape(printable(text))}[/dim]", soft_wrap=True)

    def error(self, text: str) -> None:
        self._console.print(f"[red]{escape(printable(text))}[/red]", soft_wrap=True)
