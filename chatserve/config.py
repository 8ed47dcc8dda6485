"""Settings, and the one reader of the environment.

`Settings` is built once, by the command line (whose options default to `CHATSERVE_…` variables), and passed down; no
other module looks at the environment for our own variables.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, TypeVar

import msgspec

_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}

SettingsT = TypeVar("SettingsT", bound=msgspec.Struct)

KV_SNAPSHOT_S: Final = 20.0
"""Longest time that an engine takes to write its KV snapshot when it ends."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one client may ask for; announced in `welcome.limits`. Bytes are of UTF-8."""

    max_frame_bytes: int = 4 * 1024 * 1024
    max_text_bytes: int = 256 * 1024
    max_system_bytes: int = 64 * 1024
    max_title_bytes: int = 1024
    max_messages_per_session: int = 20_000
    max_sessions_per_user: int = 10_000
    max_bytes_per_user: int = 1024 * 1024 * 1024
    """Of all that is stored of a user's sessions: texts, token ids and records."""
    max_generations_per_user: int = 64
    max_connections_per_user: int = 256


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a user decides about the engine, whoever starts it."""

    device: str = "auto"
    block_size: int = 16
    kv_cache_memory: str = "auto"
    """Bytes of device KV with an optional suffix (512M, 4G), a number of blocks (64blocks), or auto."""
    host_cache_memory: str = "auto"
    max_batched_tokens: int = 0
    """Most tokens a step; 0: 512 on a CPU, 8192 on a GPU (`batched_tokens`)."""
    max_running: int = 256
    max_queued: int = 1024
    context_tokens: int = 0
    """Cap on the context; 0: the model's own."""
    model_impl: str = "auto"
    """llama: our own definition; hf: transformers' model through our attention; auto: the first that fits."""
    dtype: str = "auto"
    """Of weights and what is computed: float32, bfloat16 or float16; auto: float32 on a CPU, 16 bits on a GPU."""
    kv_cache_dtype: str = "auto"
    """Of KV: float32, bfloat16, float16, or fp8, which is float8_e4m3fn; auto: as `dtype`."""
    attention: str = "auto"
    """torch: plain torch, on any device; triton: our kernels; auto: those on the GPUs and models that they serve."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that weights, steps and KV may take together."""
    threads: int = 0
    """Compute threads on a CPU; 0: one a physical core."""
    kv_snapshot: Path | None = None
    """Directory in which KV outlives an orderly end; None: it does not."""
    kv_snapshot_limit: str = "16G"
    """Most KV in it, as `kv_cache_memory` is given."""


class EngineSettings(EngineOptions, frozen=True, kw_only=True):
    """What the engine process is started with."""

    model_dir: Path
    """safetensors, config and tokenizer, as `chatserve model pull` leaves them."""
    model_name: str
    graphs: bool = True
    """Replay captured graphs on CUDA; False: launch every kernel of every step, to look for faults."""
    load_format: str = "safetensors"
    """random: make weights up, for measurements of a shape."""
    socket_path: Path = Path("engine.sock")

    @classmethod
    def of(cls, options: EngineOptions, *, model_dir: Path, model_name: str, socket_path: Path) -> EngineSettings:
        """The same options for one model and one socket."""
        chosen = {name: getattr(options, name) for name in EngineOptions.__struct_fields__}
        return cls(model_dir=model_dir, model_name=model_name, socket_path=socket_path, **chosen)

    def batched_tokens(self, device_type: str) -> int:
        """Most tokens a step on such a device."""
        return self.max_batched_tokens or _BATCHED_TOKENS.get(device_type, _BATCHED_TOKENS["cpu"])


class ServeSettings(EngineOptions, frozen=True, kw_only=True):
    """What `chatserve serve` was asked for, the engine's share included."""

    model: str = "smollm2-135m"
    host: str = "127.0.0.1"
    port: int = 8000
    data_dir: Path
    cache_dir: Path
    """Downloaded and converted models."""
    redis_url: str | None = None
    store_fsync: Literal["everysec", "always"] = "everysec"
    """When the built-in store's file is forced to disk: always survives a power loss whole."""
    session_expiry_days: float = 0.0
    """Conversations that nobody changed for so long are deleted; 0: never."""
    web_workers: int = 1
    on_restart: Literal["resume", "interrupt"] = "resume"
    """What becomes of answers whose server died or was stopped: they go on, or are marked interrupted."""
    drain_s: float = 5.0
    """How long a server that is told to stop waits for answers to end."""
    tokens_file: Path | None = None
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    system_prompts_dir: Path | None = None
    """Text files: the operator's system prompts, whose KV users may share."""
    orphan_grace_s: float = 60.0
    engine_silence_s: float = 10.0
    """An engine that is connected and says nothing for so long counts as away."""
    event_history: int = 4096
    """Events kept a session for clients that reconnect; older ones are answered with a snapshot."""
    max_socket_queue_bytes: int = 4 * 1024 * 1024
    """Bytes waiting for one slow socket before it is closed with 4008."""
    limits: Limits = Limits()

    @property
    def run_dir(self) -> Path:
        """Sockets, pid files and locks."""
        return self.data_dir / "run"

    @property
    def engine_socket(self) -> Path:
        return self.run_dir / "engine.sock"

    @property
    def store_socket(self) -> Path:
        return self.run_dir / "store.sock"


class WebSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a web worker is started with."""

    serve: ServeSettings
    model_dir: Path
    engine_socket: Path
    redis_url: str
    place: str = ""
    """Has one process at a time: whoever starts there follows one that is gone. Empty: a place of its own."""
    listen_fd: int | None = None
    """A listening socket that was inherited; None: listen on the host and port."""


def encode_settings(settings: msgspec.Struct) -> str:
    """Settings as JSON."""
    return msgspec.json.encode(settings, enc_hook=str).decode()


def hand_over_settings(settings: msgspec.Struct, path: Path) -> str:
    """Write settings where only this user can read them; the argument to start a child process with.

    A command line can be read by everyone on the machine, and a store's URL may hold a password.
    """
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(encode_settings(settings))
    return f"@{path}"


def decode_settings(text: str, kind: type[SettingsT]) -> SettingsT:
    """The inverse of `encode_settings`, and of `hand_over_settings`.

    Raises:
        msgspec.MsgspecError: not settings of this kind; says where.
        OSError: the file cannot be read.
    """
    if text.startswith("@"):
        text = Path(text[1:]).read_text()
    return msgspec.json.decode(text, type=kind, dec_hook=lambda wanted, value: wanted(value))
