"""The command line `chatserve`.

Owns options, their `CHATSERVE_…` variables and how a command's failure is shown: one line and a non-zero exit code.
Each command imports what it needs when it runs, so that `--help` is quick and nothing here loads torch.
"""

from __future__ import annotations

import math
import pkgutil
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from chatserve import __version__
from chatserve.config import Limits, ServeSettings
from chatserve.errors import StartupError
from chatserve.options import ATTENTIONS, DTYPES, MAX_BLOCK_SIZE, MODEL_IMPLS
from chatserve.supervisor.paths import default_cache_dir, default_data_dir

F = TypeVar("F", bound=Callable[..., Any])

_DEFAULTS = ServeSettings(data_dir=Path(), cache_dir=Path())
_LIMITS = Limits()
_DIRECTORY = click.Path(file_okay=False, path_type=Path)
_FILE = click.Path(dir_okay=False, path_type=Path)


class _Cli(click.Group):
    """Shows a start-up error as one line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except StartupError as error:
            click.echo(f"chatserve: {error}", err=True)
            ctx.exit(1)


class _ByteCount(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes, with an optional K, M, G or T for powers of 1024."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+)([KMGT]?)", value.strip(), re.IGNORECASE)
        if found is None:
            self.fail(f"{value!r} is no number of bytes like 500000, 512M or 4G", param, ctx)
        count = int(found[1]) << 10 * " KMGT".index(found[2].upper() or " ")
        if count == 0:
            self.fail(f"{value!r} leaves no byte; at least 1 is needed", param, ctx)
        return count


class _FiniteRange(click.FloatRange):
    """A range without infinity and NaN, which no comparison refuses and settings cannot hold."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is no finite number.", param, ctx)
        return number


def option(*names: str, **attrs: Any) -> Callable[[F], F]:
    """An option with its `CHATSERVE_…` variable; the variable and the default stand in its help."""
    variable = "CHATSERVE_" + names[0].removeprefix("--").replace("-", "_").upper()
    attrs = {"envvar": variable, "show_envvar": True, "show_default": True, **attrs}
    return click.option(*names, **attrs)


_cache_dir = option(
    "--cache-dir",
    type=_DIRECTORY,
    default=default_cache_dir,
    show_default="the user's cache directory",
    help="Where downloaded and converted models are kept.",
)
_data_dir = option(
    "--data-dir",
    type=_DIRECTORY,
    default=default_data_dir,
    show_default="the user's data directory",
    help="Where the conversations are kept.",
)
_model = option(
    "--model",
    default=_DEFAULTS.model,
    help="smollm2-135m, a directory of safetensors, a .gguf file, or the id of a model on the hub.",
)
_redis_url = option(
    "--redis-url", help="A Redis or Valkey server for the conversations, instead of the built-in store."
)
_tokens_file = option(
    "--tokens-file", type=_FILE, help="Who may log in, one `user:hash` a line; `chatserve token` adds to it."
)
_host = option("--host", default=_DEFAULTS.host, help="Address to listen on. Others than loopback need --tokens-file.")
_port = option("--port", type=click.IntRange(0, 65535), default=_DEFAULTS.port, help="0 takes any free port.")
_device = option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default=_DEFAULTS.device)


@click.group(cls=_Cli, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="chatserve")
def cli() -> None:
    """An interactive chat server for your own model, whose conversation tree owns its KV cache."""


@cli.command()
@_host
@_port
@_model
@_data_dir
@_cache_dir
@_device
@option(
    "--block-size", type=click.IntRange(1, MAX_BLOCK_SIZE), default=_DEFAULTS.block_size, help="Tokens in a KV block."
)
@option(
    "--kv-cache-memory",
    default=_DEFAULTS.kv_cache_memory,
    help="KV memory on the device: bytes (512M, 4G), blocks (64blocks), or auto.",
)
@option(
    "--host-cache-memory", default=_DEFAULTS.host_cache_memory, help="KV memory on the host for cold conversations."
)
@option(
    "--max-batched-tokens",
    type=click.IntRange(0),
    default=_DEFAULTS.max_batched_tokens,
    help="Most tokens in a step; 0 takes 512 on a CPU and 8192 on a GPU.",
)
@option("--max-running", type=click.IntRange(1), default=_DEFAULTS.max_running, help="Most answers in a batch.")
@option("--max-queued", type=click.IntRange(0), default=_DEFAULTS.max_queued, help="Most answers that wait.")
@option(
    "--context-tokens",
    type=click.IntRange(0),
    default=_DEFAULTS.context_tokens,
    help="Cap on a conversation's length; 0 takes the model's own.",
)
@option(
    "--model-impl",
    type=click.Choice(MODEL_IMPLS),
    default=_DEFAULTS.model_impl,
    help="Our own model code, or transformers' through our attention.",
)
@option(
    "--dtype",
    type=click.Choice(DTYPES),
    default=_DEFAULTS.dtype,
    help="Precision of weights and KV; auto takes float32 on a CPU and 16 bits on a GPU.",
)
@option(
    "--attention",
    type=click.Choice(ATTENTIONS),
    default=_DEFAULTS.attention,
    help="Attention by plain torch or by our Triton kernels; auto takes the kernels on a GPU that they are made for.",
)
@option(
    "--gpu-memory-utilization",
    type=_FiniteRange(0.0, 1.0, min_open=True),
    default=_DEFAULTS.gpu_memory_utilization,
    help="Share of a GPU's memory that weights, steps and KV may take together.",
)
@option("--threads", type=click.IntRange(0), default=_DEFAULTS.threads, help="CPU threads; 0 takes one a core.")
@_redis_url
@option(
    "--store-fsync",
    type=click.Choice(["everysec", "always"]),
    default=_DEFAULTS.store_fsync,
    help="When the built-in store forces what it has written to disk.",
)
@option(
    "--session-expiry",
    "session_expiry_days",
    metavar="DAYS",
    type=_FiniteRange(0),
    default=_DEFAULTS.session_expiry_days,
    help="Delete conversations that nobody changed for so many days; 0 keeps them for ever.",
)
@option(
    "--web-workers",
    type=click.IntRange(1, 64),
    default=_DEFAULTS.web_workers,
    help="Processes that serve sockets and HTTP; one is enough for hundreds of readers.",
)
@option(
    "--on-restart",
    type=click.Choice(["resume", "interrupt"]),
    default=_DEFAULTS.on_restart,
    help="What becomes of answers whose server died or was stopped.",
)
@option(
    "--drain-s",
    metavar="SECONDS",
    type=_FiniteRange(0),
    default=_DEFAULTS.drain_s,
    help="How long a server that is told to stop waits for answers to end before it hands them over.",
)
@_tokens_file
@option(
    "--kv-snapshot",
    type=_DIRECTORY,
    help="Directory in which cached KV outlives a restart: written at the end (up to 20 s), read as it is needed.",
)
@option(
    "--kv-snapshot-limit",
    default=_DEFAULTS.kv_snapshot_limit,
    help="Most KV in the snapshot, the most recently used first: bytes (512M, 4G) or blocks (64blocks).",
)
@option(
    "--allowed-origin",
    "allowed_origins",
    multiple=True,
    help="Another web origin whose pages may connect (repeatable; in the variable, separated by spaces).",
)
@option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    help="Another name that this server is known by (repeatable; in the variable, separated by spaces).",
)
@option("--system-prompts-dir", type=_DIRECTORY, help="Text files: system prompts whose KV all users share.")
@option(
    "--orphan-grace-s",
    metavar="SECONDS",
    type=_FiniteRange(0),
    default=_DEFAULTS.orphan_grace_s,
    help="Seconds that an answer goes on without a reader.",
)
@option(
    "--engine-silence-s",
    metavar="SECONDS",
    type=_FiniteRange(0.1),
    default=_DEFAULTS.engine_silence_s,
    help="Seconds without a sign of life after which the engine counts as away.",
)
@option(
    "--event-history",
    type=click.IntRange(1),
    default=_DEFAULTS.event_history,
    help="Events kept a conversation for clients that reconnect.",
)
@option(
    "--max-socket-queue-bytes",
    type=click.IntRange(1024),
    default=_DEFAULTS.max_socket_queue_bytes,
    help="Bytes that may wait for one slow reader before its socket is closed.",
)
@option(
    "--max-sessions-per-user",
    type=click.IntRange(1),
    default=_LIMITS.max_sessions_per_user,
    help="Most conversations of one user.",
)
@option(
    "--max-bytes-per-user",
    metavar="BYTES",
    type=_ByteCount(),
    default=_LIMITS.max_bytes_per_user,
    show_default="1G",
    help="Most that one user's conversations may take in the store (512M, 4G).",
)
@option(
    "--max-generations-per-user",
    type=click.IntRange(1),
    default=_LIMITS.max_generations_per_user,
    help="Most answers of one user at once, over all servers.",
)
def serve(data_dir: Path, cache_dir: Path, **options: Any) -> None:
    """Serve the chat page, the chat.v1 protocol and the OpenAI API."""
    import asyncio  # noqa: PLC0415

    from chatserve.supervisor.supervisor import Supervisor  # noqa: PLC0415

    options["host"] = options["host"].strip("[]")  # an IPv6 address as URLs have it
    if options["kv_snapshot"] is not None:
        options["kv_snapshot"] = options["kv_snapshot"].absolute()
    limits = Limits(**{name: options.pop(name) for name in Limits.__struct_fields__ if name in options})
    settings = ServeSettings(data_dir=data_dir.absolute(), cache_dir=cache_dir.absolute(), limits=limits, **options)

    async def run() -> int:
        return await Supervisor(settings).run()

    sys.exit(asyncio.run(run()))


@cli.command()
@option("--url", default="http://127.0.0.1:8000", help="The server's address.")
@option("--token", help="Your token, where the server asks for one.")
@option("--session", help="The id of a conversation to open, instead of a new one.")
def chat(url: str, token: str | None, session: str | None) -> None:
    """Chat in the terminal. /help inside lists the commands; Ctrl-C stops an answer."""
    from chatserve.terminal.app import run  # noqa: PLC0415

    sys.exit(run(url, token=token, session=session))


@cli.group()
def model() -> None:
    """Fetch and list models."""


@model.command("pull")
@click.argument("name", default=_DEFAULTS.model)
@_cache_dir
def model_pull(name: str, cache_dir: Path) -> None:
    """Fetch and convert the model NAME, once."""
    from chatserve.model import catalog  # noqa: PLC0415
    from chatserve.progress import pull_progress  # noqa: PLC0415

    with pull_progress(name) as progress:
        path = catalog.pull(name, cache_dir.absolute(), progress)
    click.echo(f"{name} is at {path}", err=True)


@model.command("list")
@_cache_dir
def model_list(cache_dir: Path) -> None:
    """List the models that --model takes by name, and what is here already."""
    from chatserve.model import catalog  # noqa: PLC0415

    for entry in catalog.list_models(cache_dir.absolute()):
        where = str(entry.path) if entry.path else f"not here yet; `chatserve model pull {entry.name}` fetches it"
        click.echo(f"{entry.name}  {entry.num_bytes / 1e6:.0f} MB  {entry.about}\n  {where}")


@cli.command()
@_host
@_port
@_model
@_data_dir
@_cache_dir
@_device
@_redis_url
@_tokens_file
def doctor(data_dir: Path, cache_dir: Path, **options: Any) -> None:
    """Check all that `chatserve serve` with the same options needs, and say what to do."""
    from chatserve.doctor import examine, show  # noqa: PLC0415

    settings = ServeSettings(data_dir=data_dir.absolute(), cache_dir=cache_dir.absolute(), **options)
    sys.exit(show(examine(settings)))


@cli.command()
@click.argument("user")
@option(
    "--tokens-file",
    type=_FILE,
    required=True,
    help="The file to add the token's hash to; `chatserve serve` takes the same option.",
)
def token(user: str, tokens_file: Path) -> None:
    """Make a token for USER, show it once, and add its hash to the token file."""
    from chatserve.server import auth  # noqa: PLC0415

    click.echo(auth.add_token(tokens_file, user))


@cli.command(context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False)
@click.argument("name", required=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def bench(name: str | None, args: tuple[str, ...]) -> None:
    """Run the measurement NAME; without a name, list them. `bench NAME --help` shows its options."""
    import importlib  # noqa: PLC0415

    from chatserve import bench as package  # noqa: PLC0415

    names = sorted(found.name for found in pkgutil.iter_modules(package.__path__) if not found.name.startswith("_"))
    if name is None or name in {"-h", "--help"}:
        click.echo("chatserve bench NAME [options], where NAME is one of:")
        for each in names:
            click.echo(f"  {each}")
        return
    if name not in names:
        raise StartupError(f"there is no measurement {name}; there are: {', '.join(names)}")
    sys.exit(importlib.import_module(f"chatserve.bench.{name}").main(list(args)) or 0)


def main() -> None:
    """The console script."""
    # A launcher's own name would be shown in help and errors otherwise.
    cli.main(args=sys.argv[1:], prog_name="chatserve")
