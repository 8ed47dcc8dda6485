"""The options of the command line: each is stated once, whichever commands take it.

Owns names, types, `CHATSERVE_…` variables and help. An option that is a setting has the default of the settings'
field; whether a value makes sense beside others is for whoever uses it to say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from chatserve.config import ServeSettings
from chatserve.options import ATTENTIONS, DTYPES, KV_CACHE_DTYPES, MAX_BLOCK_SIZE, MODEL_IMPLS
from chatserve.supervisor.paths import default_cache_dir, default_data_dir

F = TypeVar("F", bound=Callable[..., Any])

FILE: Final = click.Path(dir_okay=False, path_type=Path)
DIRECTORY: Final = click.Path(file_okay=False, path_type=Path)

DEFAULTS: Final = ServeSettings(data_dir=Path(), cache_dir=Path())


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
    return click.option(*names, **{"envvar": variable, "show_envvar": True, "show_default": True, **attrs})


# --- settings ---------------------------------------------------------------------------------------------------------


def _setting(
    name: str,
    text: str | None = None,
    kind: click.ParamType | None = None,  # type: ignore[type-arg]
    *,
    field: str = "",
    **attrs: Any,
) -> tuple[str, Callable[[Any], Any]]:
    """The option that is the settings' `field`, which is called as the option is where nothing else is said."""
    field = field or name.removeprefix("--").replace("-", "_")
    if "default" not in attrs:
        attrs["default"] = getattr(DEFAULTS if hasattr(DEFAULTS, field) else DEFAULTS.limits, field)
    return field, option(name, field, type=kind, help=text, **attrs)


_SETTINGS: Final[dict[str, Callable[[Any], Any]]] = dict(
    (
        _setting("--host", "Address to listen on. Others than loopback need --tokens-file."),
        _setting("--port", "0 takes any free port.", click.IntRange(0, 65535)),
        _setting("--model", "smollm2-135m, a directory of safetensors, a .gguf file, or the id of a model on the hub."),
        _setting(
            "--data-dir",
            "Where the conversations are kept.",
            DIRECTORY,
            default=default_data_dir,
            show_default="the user's data directory",
        ),
        _setting(
            "--cache-dir",
            "Where downloaded and converted models are kept.",
            DIRECTORY,
            default=default_cache_dir,
            show_default="the user's cache directory",
        ),
        _setting("--device", kind=click.Choice(["auto", "cpu", "cuda"])),
        _setting("--block-size", "Tokens in a KV block.", click.IntRange(1, MAX_BLOCK_SIZE)),
        _setting("--kv-cache-memory", "KV memory on the device: bytes (512M, 4G), blocks (64blocks), or auto."),
        _setting("--host-cache-memory", "KV memory on the host for cold conversations."),
        _setting(
            "--max-batched-tokens", "Most tokens in a step; 0 takes 512 on a CPU and 8192 on a GPU.", click.IntRange(0)
        ),
        _setting("--max-running", "Most answers in a batch.", click.IntRange(1)),
        _setting("--max-queued", "Most answers that wait.", click.IntRange(0)),
        _setting("--context-tokens", "Cap on a conversation's length; 0 takes the model's own.", click.IntRange(0)),
        _setting(
            "--model-impl", "Our own model code, or transformers' through our attention.", click.Choice(MODEL_IMPLS)
        ),
        _setting(
            "--dtype",
            "Precision of weights and of what is computed; auto takes float32 on a CPU and 16 bits on a GPU.",
            click.Choice(DTYPES),
        ),
        _setting(
            "--kv-cache-dtype",
            "Precision of KV; auto takes that of --dtype. fp8 (e4m3) holds twice the tokens of 16 bits, rounded.",
            click.Choice(KV_CACHE_DTYPES),
        ),
        _setting(
            "--attention",
            "Attention by plain torch or by our Triton kernels;"
            " auto takes the kernels on a GPU that they are made for.",
            click.Choice(ATTENTIONS),
        ),
        _setting(
            "--gpu-memory-utilization",
            "Share of a GPU's memory that weights, steps and KV may take together.",
            _FiniteRange(0.0, 1.0, min_open=True),
        ),
        _setting("--threads", "CPU threads; 0 takes one a core.", click.IntRange(0)),
        _setting("--redis-url", "A Redis or Valkey server for the conversations, instead of the built-in store."),
        _setting(
            "--store-fsync",
            "When the built-in store forces what it has written to disk.",
            click.Choice(["everysec", "always"]),
        ),
        _setting(
            "--session-expiry",
            "Delete conversations that nobody changed for so many days; 0 keeps them for ever.",
            _FiniteRange(0),
            field="session_expiry_days",
            metavar="DAYS",
        ),
        _setting(
            "--web-workers",
            "Processes that serve sockets and HTTP; one is enough for hundreds of readers.",
            click.IntRange(1, 64),
        ),
        _setting(
            "--on-restart",
            "What becomes of answers whose server died or was stopped.",
            click.Choice(["resume", "interrupt"]),
        ),
        _setting(
            "--drain-s",
            "How long a server that is told to stop waits for answers to end before it hands them over.",
            _FiniteRange(0),
            metavar="SECONDS",
        ),
        _setting("--tokens-file", "Who may log in, one `user:hash` a line; `chatserve token` adds to it.", FILE),
        _setting(
            "--kv-snapshot",
            "Directory in which cached KV outlives a restart: written at the end (up to 20 s), read as it is needed.",
            DIRECTORY,
        ),
        _setting(
            "--kv-snapshot-limit",
            "Most KV in the snapshot, the most recently used first: bytes (512M, 4G) or blocks (64blocks).",
        ),
        _setting(
            "--allowed-origin",
            "Another web origin whose pages may connect (repeatable; in the variable, separated by spaces).",
            field="allowed_origins",
            multiple=True,
        ),
        _setting(
            "--allowed-host",
            "Another name that this server is known by (repeatable; in the variable, separated by spaces).",
            field="allowed_hosts",
            multiple=True,
        ),
        _setting("--system-prompts-dir", "Text files: system prompts whose KV all users share.", DIRECTORY),
        _setting(
            "--orphan-grace-s", "Seconds that an answer goes on without a reader.", _FiniteRange(0), metavar="SECONDS"
        ),
        _setting(
            "--engine-silence-s",
            "Seconds without a sign of life after which the engine counts as away.",
            _FiniteRange(0.1),
            metavar="SECONDS",
        ),
        _setting("--event-history", "Events kept a conversation for clients that reconnect.", click.IntRange(1)),
        _setting(
            "--max-socket-queue-bytes",
            "Bytes that may wait for one slow reader before its socket is closed.",
            click.IntRange(1024),
        ),
        _setting("--max-sessions-per-user", "Most conversations of one user.", click.IntRange(1)),
        _setting(
            "--max-bytes-per-user",
            "Most that one user's conversations may take in the store (512M, 4G).",
            _ByteCount(),
            metavar="BYTES",
            show_default="1G",
        ),
        _setting(
            "--max-generations-per-user", "Most answers of one user at once, over all servers.", click.IntRange(1)
        ),
    )
)
"""Every option of `serve` by its field of `ServeSettings` or `Limits`, in the order of the help."""


def settings(*fields: str) -> Callable[[F], F]:
    """The options of these settings, in this order; without any, those of all."""

    def decorate(command: F) -> F:
        for field in reversed(fields or tuple(_SETTINGS)):
            command = _SETTINGS[field](command)
        return command

    return decorate
