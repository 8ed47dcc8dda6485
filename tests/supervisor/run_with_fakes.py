"""`chatserve serve` with fakes for all that it starts: `run_with_fakes.py SETTINGS-JSON ENGINE-MODE WEB-MODE STORE`,
where STORE is fake or real."""

import asyncio
import sys
from pathlib import Path

from chatserve.config import ServeSettings, decode_settings
from chatserve.errors import StartupError
from chatserve.supervisor.children import Commands
from chatserve.supervisor.embedded_store import EmbeddedStore
from chatserve.supervisor.supervisor import GraceTimes, Supervisor

FAKE = (sys.executable, str(Path(__file__).with_name("fake_child.py")))


class FakeStore:
    url = "unix:///nowhere"

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def start(self) -> None:
        sys.stdout.write("store starts 0\n")
        sys.stdout.flush()

    def stop(self) -> None:
        sys.stdout.write("store ends 0\n")
        sys.stdout.flush()

    def poll(self) -> int | None:
        return None

    def watch_room(self) -> str | None:
        return None


def main() -> int:
    settings = decode_settings(sys.argv[1], ServeSettings)
    engine_mode, web_mode, store = sys.argv[2:]

    async def run() -> int:
        return await Supervisor(
            settings,
            commands=Commands(engine=(*FAKE, "engine", engine_mode), web=(*FAKE, "web", web_mode)),
            store_factory=FakeStore if store == "fake" else EmbeddedStore,
            resolve_model=lambda _name, _cache_dir: Path("/nowhere"),
            grace=GraceTimes(web_s=1.0, engine_s=1.0),
        ).run()

    try:
        return asyncio.run(run())
    except StartupError as error:
        sys.stderr.write(f"chatserve: {error}\n")
        return 1


sys.exit(main())
