"""One Chromium, one server and one page a module; each test loads the page anew, with nothing remembered, and must end
without a complaint.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, Page, async_playwright, expect

from tests.server.harness import Server, running_server, tiny_model_dir
from tests.web.answers import Answers

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

WATCH = """
    addEventListener('securitypolicyviolation', (e) => console.error(`${e.violatedDirective} ${e.blockedURI}`));
    window.alert = () => console.error('alert');
    window.longTasks = [];
    new PerformanceObserver((list) => longTasks.push(...list.getEntries().map((e) => e.duration)))
        .observe({ type: 'longtask', buffered: true });
"""


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what has no event of its own."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  the server's and Playwright's own state, which nobody announces
            await asyncio.sleep(0.01)


expect.set_options(timeout=15_000)
"""A machine that is busy with other tests is slow, not wrong."""


class Tab:
    """A page, and the few things that every test does with one."""

    def __init__(self, page: Page, server: Server) -> None:
        self.page = page
        self.server = server
        self.problems: list[str] = []
        self.sent: list[dict[str, Any]] = []
        """Every frame that the page has sent."""
        self._listeners: dict[Any, Callable[[Any], None]] = {
            "pageerror": lambda error: self.problems.append(f"exception: {error}"),
            "request": self._note_request,
            "websocket": lambda socket: socket.on("framesent", lambda data: self.sent.append(json.loads(data))),
            "console": self._note_console,
        }
        for event, listener in self._listeners.items():
            page.on(event, listener)

    def _note_request(self, request: Any) -> None:
        if not request.url.startswith((f"{self.server.url}/", f"blob:{self.server.url}/", "data:")):
            self.problems.append(f"request: {request.url}")

    def _note_console(self, message: Any) -> None:
        if message.type == "error" and "WebSocket" not in message.text and "status of 4" not in message.text:
            self.problems.append(f"console: {message.text}")

    async def open(self, fragment: str = "#/") -> None:
        await self.page.goto(f"{self.server.url}/{fragment}")
        await expect(self.page.locator("#model")).not_to_be_empty()

    async def write(self, text: str) -> None:
        """Until it can be sent: a chat that is still being read takes a text, but sends nothing."""
        await self.page.fill("#composer-text", text)
        await expect(self.page.locator("#composer .send")).to_be_enabled()

    async def send(self, text: str) -> None:
        await self.write(text)
        await self.page.press("#composer-text", "Enter")

    async def ask(self, text: str) -> None:
        """Send and wait for the end of the answer."""
        await self.write(text)
        before = await self.page.locator(".message.assistant").count()
        await self.page.press("#composer-text", "Enter")
        await expect(self.page.locator(".message.assistant")).to_have_count(before + 1)
        await self.finished()

    async def finished(self) -> None:
        await expect(self.page.locator(".message.generating")).to_have_count(0)
        await expect(self.page.locator(".message.assistant .receipt").last).to_be_visible()

    async def act(self, role: str, action: str) -> None:
        """Press a button of the last message of a role."""
        message = self.page.locator(f".message.{role}").last
        await message.hover()
        await message.locator(f"[data-action={action}]").click()

    async def texts(self) -> list[str]:
        return [text.strip() for text in await self.page.locator(".bubble, .markdown").all_inner_texts()]

    @property
    def session(self) -> str:
        return self.page.url.rsplit("/", 1)[1]

    async def forget(self) -> None:
        """Leave the page (which keeps its draft) and then make the browser one that has never been here."""
        await self.page.goto(f"{self.server.url}/static/icon.svg")
        await self.page.evaluate("() => { localStorage.clear(); sessionStorage.clear(); }")

    def check(self) -> None:
        assert self.problems == []

    def let_go(self) -> None:
        """The page goes to another test."""
        for event, listener in self._listeners.items():
            self.page.remove_listener(event, listener)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.fail("the browser tests need Chromium: install the package `chromium`")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        await browser.close()


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers(tiny_model_dir())


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server(answers: Answers) -> AsyncIterator[Server]:
    async with running_server(script=answers, num_blocks=2048, context_tokens=8192) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def context(browser: Browser) -> AsyncIterator[BrowserContext]:
    context = await browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(15_000)
    await context.add_init_script(WATCH)
    yield context
    await context.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def page(context: BrowserContext) -> Page:
    return await context.new_page()


@pytest_asyncio.fixture(loop_scope="module")
async def tab(page: Page, server: Server, answers: Answers) -> AsyncIterator[Tab]:
    answers.say(lambda question: f"You said: {question}")
    tab = Tab(page, server)
    try:
        await tab.forget()
        await tab.open()
        yield tab
        tab.check()
    finally:
        server.engine.pace.release()
        tab.let_go()
