"""GGUF to safetensors, as a process of its own: `python -m chatserve.model.convert SOURCE DESTINATION`.

transformers reads the file, widens its weights to float32 and writes what `from_pretrained` reads. It needs torch and
over a gigabyte for half a minute, which the process that asked for it should not keep. Each line on standard output is
one JSON object: `{"done": 1, "total": 4}`, or `{"error": "…", "no_space": false}` before a non-zero exit.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chatserve.errors import StartupError
from chatserve.model.fetch import is_no_space, no_space

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 4


def convert_gguf(source: Path, destination: Path, progress: Callable[[int, int], None]) -> None:
    """Convert `source` into the existing directory `destination`, in a child process.

    Raises:
        StartupError: what the child said, in one line.
    """
    command = [sys.executable, "-m", "chatserve.model.convert", str(source), str(destination)]
    # The child must find this very package, also when it runs from a checkout that is not installed.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    last_words = ""
    with (destination / "convert.log").open("w+") as log:
        with subprocess.Popen(  # noqa: S603 - our own interpreter and module
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process:
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    message = _parse(line)
                    if message.get("no_space"):
                        raise no_space(destination.parent)
                    if "error" in message:
                        raise StartupError(f"{source.name} could not be converted: {message['error']}")
                    if "done" in message:
                        progress(message["done"], message["total"])
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            log.seek(0)
            last_words = next((line.strip() for line in reversed(log.read().splitlines()) if line.strip()), "")
            ended = f"killed by signal {-process.returncode} (out of memory?)" if process.returncode < 0 else last_words
            raise StartupError(f"{source.name} could not be converted: {ended}")
    (destination / "convert.log").unlink()


def _parse(line: str) -> dict[str, Any]:
    """Libraries may print; what is not ours is ignored."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


def _convert(source: Path, destination: Path, report: Callable[[int], None]) -> None:
    report(0)
    import torch  # noqa: PLC0415 - only the child pays for it
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: PLC0415

    report(1)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(destination)
    report(2)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    report(3)
    model.save_pretrained(destination)
    tidy_config(destination / "config.json")
    for path in destination.iterdir():
        path.chmod(0o644)
    report(STEPS)


def tidy_config(path: Path) -> None:
    """Drop what describes the quantised source: the weights beside this configuration are plain."""
    config = json.loads(path.read_bytes())
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(name, None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def main(arguments: list[str]) -> int:
    source, destination = Path(arguments[0]), Path(arguments[1])
    out = sys.stdout

    def say(**message: object) -> None:
        print(json.dumps(message), file=out, flush=True)

    try:
        with contextlib.redirect_stdout(sys.stderr):
            _convert(source, destination, lambda done: say(done=done, total=STEPS))
    except Exception as error:  # noqa: BLE001 - whatever a library raises becomes one line for the parent
        text = next(iter(str(error).splitlines()), "")
        say(error=f"{type(error).__name__}: {text}", no_space=is_no_space(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
