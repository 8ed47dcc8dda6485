"""A real server in this process: uvicorn on 127.0.0.1, the real service and engine, a fake runner, a store in memory.

    async with running_server() as server:
        server.url, server.ws_url, server.engine.pause(), server.store.fail(), …

Deterministic and fast: no model, no other process. Any of the parts can be handed in instead.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from chatserve.chat.prompt import PromptEncoder
from chatserve.chat.redis_store import RedisStore, open_store
from chatserve.chat.store import Store
from chatserve.config import Limits, ServeSettings, WebSettings
from chatserve.sched.plan import StepPlan
from chatserve.server.app import build_app, running
from chatserve.server.auth import Authenticator, token_line
from chatserve.server.context import Context
from chatserve.server.worker import bind, serve
from chatserve.supervisor.embedded_store import EmbeddedStore
from tests.fakes.engines import make_engine
from tests.fakes.fake_runner import FakeRunner
from tests.fakes.inline_engine import InlineEngineClient
from tests.fakes.memory_store import MemoryStore
from tests.server.tiny import VOCAB_SIZE, make_model_dir, wordy


class Server:
    """A running server and the parts that a test may want to reach into."""

    def __init__(self, settings: WebSettings, store: Any, engine: InlineEngineClient, runner: FakeRunner) -> None:
        self.settings = settings
        self.store = store
        self.engine = engine
        self.runner = runner
        self.context: Context
        self.port = 0
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ws_url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/ws"

    async def start(self) -> None:
        ready = asyncio.Event()

        @contextlib.asynccontextmanager
        async def open_context(settings: WebSettings) -> AsyncIterator[Context]:
            encoder = encoder_of(settings.model_dir)
            authenticator = Authenticator(settings.serve.tokens_file)
            await self.engine.connect()
            async with running(settings.serve, authenticator, self.store, self.engine, encoder) as context:
                self.context = context
                ready.set()
                yield context

        self._stop.clear()
        listener = bind("127.0.0.1", self.port)
        self.port = listener.getsockname()[1]
        app = build_app(self.settings, open_context)
        limit = self.settings.serve.limits.max_frame_bytes
        self._task = asyncio.create_task(serve(app, listener, limit, self._stop), name="harness server")
        waiter = asyncio.create_task(ready.wait())
        await asyncio.wait({self._task, waiter}, return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()
        if self._task.done():
            self._task.result()

    async def stop(self) -> None:
        """End it as SIGTERM does."""
        if self._task is not None:
            self._stop.set()
            task, self._task = self._task, None
            await task

    async def restart(self) -> None:
        """A new server process, as its clients see it: same address, same store, same engine."""
        await self.stop()
        self.engine = self.engine.successor() if hasattr(self.engine, "successor") else self.engine
        await self.start()


@lru_cache(maxsize=4)
def encoder_of(model_dir: Path) -> PromptEncoder:
    return PromptEncoder(model_dir, operator_prompts=("You are the operator's assistant.",))


@lru_cache(maxsize=1)
def tiny_model_dir() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="chatserve-tiny-"))
    atexit.register(shutil.rmtree, folder)
    return make_model_dir(folder)


class Pace:
    """Holds the engine after each step: for `delay_s`, or, with `budget` set, when it is used up."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.budget: int | None = None
        self.client: InlineEngineClient | None = None
        self._spent = asyncio.Event()

    def allow(self, num_steps: int) -> None:
        """Let the engine make so many more steps, and then hold it."""
        assert self.client is not None
        self.budget = num_steps
        if num_steps:
            self._spent.clear()
            self.client.resume()
        else:
            self._spent.set()
            self.client.pause()

    async def spent(self) -> None:
        """Until the engine has come to the last step that it was allowed."""
        await self._spent.wait()

    def release(self) -> None:
        """Let it run."""
        assert self.client is not None
        self.budget = None
        self.client.resume()

    def __call__(self, _plan: StepPlan) -> None:
        client = self.client
        assert client is not None
        if self.budget is not None:
            self.budget -= 1
            if self.budget <= 0:
                client.pause()
                self._spent.set()
        elif self.delay_s:
            client.pause()
            asyncio.get_running_loop().call_later(self.delay_s, client.resume)


class PacedEngine(InlineEngineClient):
    """`pace.allow(n)` lets it make n steps."""

    def __init__(self, runner_options: dict[str, Any], delay_s: float, max_queued: int) -> None:
        self.pace = Pace(delay_s)
        self._options = runner_options
        self._max_queued = max_queued
        self.runner = self._make_runner()
        super().__init__(make_engine(self.runner, max_queued=max_queued))
        self.pace.client = self

    def _make_runner(self) -> FakeRunner:
        runner = FakeRunner(**self._options, gate=self.pace)
        runner.keep_plans = False
        return runner

    def successor(self) -> PacedEngine:
        """A new engine like this one, for a server that starts again."""
        return PacedEngine(self._options, self.pace.delay_s, self._max_queued)

    def replace(self) -> None:
        """After `kill`: another engine takes the dead one's place."""
        self.runner = self._make_runner()
        self.revive(make_engine(self.runner, max_queued=self._max_queued))


@contextlib.asynccontextmanager
async def embedded_store(*, event_history: int = 4096) -> AsyncIterator[RedisStore]:
    """The real store on the packaged Valkey, for `running_server(store=…)`."""
    with tempfile.TemporaryDirectory(prefix="chatserve-store-") as folder:
        embedded = EmbeddedStore(Path(folder) / "store", Path(folder) / "s.sock")
        embedded.start()
        try:
            store = await open_store(embedded.url, event_history=event_history)
            try:
                yield store
            finally:
                await store.close()
        finally:
            embedded.stop()


@contextlib.asynccontextmanager
async def running_server(
    *,
    tokens: Mapping[str, str] | None = None,
    store: Store | None = None,
    script: Callable[[Sequence[int]], int] | None = wordy,
    token_delay_s: float = 0.0,
    orphan_grace_s: float = 60.0,
    event_history: int = 4096,
    max_socket_queue_bytes: int = 4 << 20,
    limits: Limits | None = None,
    num_blocks: int = 512,
    num_host_blocks: int = 128,
    context_tokens: int = 4096,
    max_queued: int = 256,
    allowed_origins: Sequence[str] = (),
    allowed_hosts: Sequence[str] = (),
    model_dir: Path | None = None,
) -> AsyncIterator[Server]:
    """`tokens` maps token to user. `server.engine.pace.allow(n)` decides how far the engine gets."""
    with tempfile.TemporaryDirectory(prefix="chatserve-test-") as folder:
        data_dir = Path(folder)
        tokens_file = None
        if tokens is not None:
            tokens_file = data_dir / "tokens"
            tokens_file.write_text("\n".join(token_line(user, token) for token, user in tokens.items()) + "\n")
        serve_settings = ServeSettings(
            data_dir=data_dir,
            cache_dir=data_dir,
            tokens_file=tokens_file,
            allowed_origins=tuple(allowed_origins),
            allowed_hosts=tuple(allowed_hosts),
            orphan_grace_s=orphan_grace_s,
            event_history=event_history,
            max_socket_queue_bytes=max_socket_queue_bytes,
            limits=limits or Limits(),
        )
        settings = WebSettings(
            serve=serve_settings,
            model_dir=model_dir or tiny_model_dir(),
            engine_socket=data_dir / "engine.sock",
            redis_url="memory://",
        )
        options = {
            "num_blocks": num_blocks,
            "num_host_blocks": num_host_blocks,
            "vocab_size": VOCAB_SIZE,
            "context_tokens": context_tokens,
            "script": script,
        }
        engine = PacedEngine(options, token_delay_s, max_queued)
        server = Server(settings, store or MemoryStore(event_history=event_history), engine, engine.runner)
        await server.start()
        try:
            yield server
        finally:
            with contextlib.suppress(AttributeError):
                server.engine.pace.release()
            await server.stop()
            await server.engine.close()
