"""`chatserve serve`: starts the store, the engine and the web workers, keeps them running, and takes them along.

Owns the order of start and end. Imports no torch, no web framework and nothing of what the children run: they are told
their settings and watched through their exit and the web worker's `/readyz`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from chatserve.config import KV_SNAPSHOT_S, EngineSettings, ServeSettings, WebSettings, hand_over_settings
from chatserve.errors import StartupError
from chatserve.options import check_options
from chatserve.server.origin import Gate
from chatserve.supervisor import network, paths
from chatserve.supervisor.children import Child, Commands, RestartPolicy, describe_exit, pause
from chatserve.supervisor.parts import EmbeddedStoreLike, ResolveModel, StoreFactory, embedded_store, resolve_model
from chatserve.supervisor.store_keeper import keep_store

_POLL_S: Final = 0.05
_LEFT_OVER_S: Final = 10.0
"""So long the processes of a killed run may hold its port; on their way out they need a fraction of it."""
_READY_SLOW_S: Final = 60.0
"""After this long a start says that it is still waiting."""


def _say(line: str) -> None:
    print(f"chatserve: {line}", file=sys.stderr, flush=True)  # noqa: T201 - a console program's log


class GraceTimes(msgspec.Struct, frozen=True, kw_only=True):
    """How long each child may take to end, in seconds; the web workers beyond `ServeSettings.drain_s`."""

    web_s: float = 10.0
    engine_s: float = 5.0

    @classmethod
    def of(cls, settings: ServeSettings) -> GraceTimes:
        """An engine that saves its KV may take that much longer."""
        default = cls()
        extra_s = KV_SNAPSHOT_S if settings.kv_snapshot is not None else 0.0
        return msgspec.structs.replace(default, engine_s=default.engine_s + extra_s)


class ChildFailedError(Exception):
    """A child could not start and has said why in a line of its own."""


class Supervisor:
    """One run of `chatserve serve`. `run` returns the process's exit code."""

    def __init__(
        self,
        settings: ServeSettings,
        *,
        commands: Commands | None = None,
        store_factory: StoreFactory = embedded_store,
        resolve_model: ResolveModel = resolve_model,
        grace: GraceTimes | None = None,
        say: Callable[[str], None] = _say,
    ) -> None:
        self._settings = settings
        self._commands = commands or Commands()
        self._store_factory = store_factory
        self._resolve_model = resolve_model
        self._grace = grace or GraceTimes.of(settings)
        self._say = say
        self._stopping = asyncio.Event()
        self._ready = False
        self._children: dict[str, Child] = {}
        self._web: list[str] = []
        """The names of the web workers."""
        self._store: EmbeddedStoreLike | None = None

    async def run(self) -> int:
        """Serve until a signal; 0 then.

        Raises:
            StartupError: it could not start; nothing is left running.
        """
        settings = self._settings
        check_options(settings)
        network.check_exposure(settings.host, settings.tokens_file)
        # The web worker has the same said, but after a model has been fetched and loaded.
        Gate(settings.host, settings.allowed_hosts, settings.allowed_origins)
        paths.prepare_data_dir(settings.data_dir)
        if settings.kv_snapshot is not None and (warning := paths.prepare_snapshot_dir(settings.kv_snapshot)):
            self._say(warning)
        lock = paths.lock_data_dir(settings.data_dir)
        try:
            patience_s = _LEFT_OVER_S if lock.follows_a_kill else 0.0
            with await network.listen_in_time(settings.host, settings.port, patience_s, self._say) as listener:
                self._watch_signals()
                return await self._serve(listener)
        finally:
            lock.release()

    def stop(self) -> None:
        """End in order; asked twice: at once."""
        if self._stopping.is_set():
            for child in self._children.values():
                child.kill()
        self._stopping.set()

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.stop)

    async def _serve(self, listener: socket.socket) -> int:
        port = listener.getsockname()[1]
        settings = msgspec.structs.replace(self._settings, port=port)
        run_dir = paths.socket_dir(settings.data_dir)
        tasks: list[asyncio.Task[None]] = []
        announcing: asyncio.Task[None] | None = None
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            # What a person did wrong is said before anything slow is begun.
            if settings.redis_url is not None:
                await network.ping_redis(settings.redis_url)
            model_dir = await self._model_dir()
            if model_dir is None:
                return 0
            engine = self._engine_settings(settings, model_dir, run_dir / "engine.sock")
            tasks.append(asyncio.create_task(self._keep("engine", self._commands.engine, engine)))
            redis_url = settings.redis_url or await self._start_store(run_dir / "store.sock")
            server = paths.server_id(settings.data_dir)
            for number in range(settings.web_workers):
                web = WebSettings(
                    serve=settings,
                    model_dir=model_dir,
                    engine_socket=run_dir / "engine.sock",
                    redis_url=redis_url,
                    place=f"{server}.{number}",
                    listen_fd=listener.fileno(),
                )
                name = "web" if settings.web_workers == 1 else f"web-{number}"
                self._web.append(name)
                tasks.append(asyncio.create_task(self._keep(name, self._commands.web, web)))
            if self._store is not None:
                tasks.append(asyncio.create_task(keep_store(self._store, self._stopping, self._say)))
            announcing = asyncio.create_task(self._announce(settings, port))
            done, _ = await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopping}:
                task.result()  # a keeper returns only while stopping, or raises
            return 0
        except ChildFailedError:
            return 1
        finally:
            self._stopping.set()
            stopping.cancel()
            if announcing is not None:
                announcing.cancel()
            await self._end(tasks)

    # --- starting ---

    async def _model_dir(self) -> Path | None:
        """The model's directory, fetched and converted first where it is not there; None: asked to stop meanwhile."""
        settings = self._settings
        # In a thread, for a file's hash may have to be computed.
        found = await asyncio.to_thread(self._resolve_model, settings.model, settings.cache_dir)
        if found is not None:
            return found
        # Conversion needs torch, which this process does not load.
        pull = (*self._commands.model, settings.model, "--cache-dir", str(settings.cache_dir))
        child = self._children["model"] = await Child.spawn("model", pull)
        waiting = [asyncio.create_task(child.wait()), asyncio.create_task(self._stopping.wait())]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        if self._stopping.is_set():
            return None
        del self._children["model"]
        if child.exit_code == 1:
            raise ChildFailedError
        found = await asyncio.to_thread(self._resolve_model, settings.model, settings.cache_dir)
        if child.exit_code != 0 or found is None:
            raise StartupError(
                f"fetching the model {settings.model} ended with {describe_exit(child.exit_code or 0)}; "
                f"`chatserve model pull {settings.model}` tries again"
            )
        return found

    @staticmethod
    def _engine_settings(settings: ServeSettings, model_dir: Path, socket_path: Path) -> EngineSettings:
        return EngineSettings.of(
            settings,
            model_dir=model_dir,
            model_name=Path(settings.model).name if os.sep in settings.model else settings.model,
            socket_path=socket_path,
        )

    async def _start_store(self, socket_path: Path) -> str:
        self._store = self._store_factory(self._settings.data_dir, socket_path, fsync=self._settings.store_fsync)
        await asyncio.to_thread(self._store.start)
        return self._store.url

    async def _announce(self, settings: ServeSettings, port: int) -> None:
        """Print the address once the page works."""
        host = network.reachable_host(settings.host)
        started = time.monotonic()
        reminded = False
        while await network.http_status(host, port, "/readyz", timeout_s=2.0) != 200:
            await asyncio.sleep(_POLL_S)
            if not reminded and time.monotonic() - started > _READY_SLOW_S:
                reminded = True
                self._say(f"still loading {settings.model}")
        self._ready = True
        print(f"ChatServe is ready at http://{host}:{port}", flush=True)  # noqa: T201 - the line people wait for

    # --- keeping ---

    async def _keep(self, name: str, command: tuple[str, ...], settings: EngineSettings | WebSettings) -> None:
        """Run a child, and again whenever it dies, until asked to stop.

        Raises:
            ChildFailedError, StartupError: it ended before the program was ever ready.
        """
        policy = RestartPolicy()
        handed_over = hand_over_settings(settings, paths.socket_dir(self._settings.data_dir) / f"{name}.json")
        argv = (*command, "--settings", handed_over)
        while not self._stopping.is_set():
            fds = (settings.listen_fd,) if isinstance(settings, WebSettings) and settings.listen_fd is not None else ()
            child = self._children[name] = await Child.spawn(name, argv, fds)
            if self._stopping.is_set():  # asked while it was being spawned: `_end` may have looked before it was there
                await child.stop(self._grace.engine_s)
                return
            exit_code = await child.wait()
            if self._stopping.is_set():
                return
            if not self._ready:
                if exit_code == 1:
                    raise ChildFailedError
                raise StartupError(self._early_death(name, exit_code))
            delay_s = policy.died(time.monotonic())
            how = describe_exit(exit_code)
            if policy.failing:
                self._say(
                    f"the {name} process ended with {how}, {policy.deaths} times within {policy.window_s:.0f} s; "
                    f"trying again every {delay_s:.0f} s"
                )
            else:
                self._say(f"the {name} process ended with {how}; starting it again")
            await pause(self._stopping, delay_s)

    @staticmethod
    def _early_death(name: str, exit_code: int) -> str:
        hint = "; is there enough memory for the model?" if exit_code == -signal.SIGKILL else ""
        return f"the {name} process ended with {describe_exit(exit_code)} before it was ready{hint}"

    # --- ending ---

    async def _end(self, tasks: list[asyncio.Task[None]]) -> None:
        """The web workers first, so that they can let answers end, say goodbye (1001) and stop what they asked the
        engine to do; the store last, because all write to it.
        """
        if model := self._children.get("model"):
            await model.stop(self._grace.engine_s)
        web_s = self._settings.drain_s + self._grace.web_s
        for names, grace_s in ((self._web, web_s), (["engine"], self._grace.engine_s)):
            children = [child for name in names if (child := self._children.get(name))]
            await asyncio.gather(*(child.stop(grace_s) for child in children))
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._store is not None:
            await asyncio.to_thread(self._store.stop)
