"""docs/protocol.md names everything there is, and its example runs."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from chatserve import errors
from chatserve.config import Limits
from chatserve.server.frames import AnyClientFrame, AnyServerFrame
from chatserve.server.protocol import CloseCode
from chatserve.types import PARAM_RANGES, FinishReason
from tests.server.harness import running_server
from tests.server.tiny import ends_after

TEXT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
FRAMES = [*get_args(AnyClientFrame), *get_args(AnyServerFrame)]
CODES = {
    error.code
    for error in vars(errors).values()
    if isinstance(error, type) and issubclass(error, errors.ChatError) and error is not errors.ChatError
}


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: frame.__name__)
def test_each_frame_and_each_of_its_fields_is_described(frame: type[msgspec.Struct]) -> None:
    assert f"`{frame.__struct_config__.tag}`" in TEXT
    for field in msgspec.structs.fields(frame):
        assert f"`{field.encode_name}`" in TEXT


def test_every_name_on_the_wire_is_described() -> None:
    limits = [field.name for field in msgspec.structs.fields(Limits)]
    for name in (*CODES, *PARAM_RANGES, *FinishReason, *limits):
        assert f"`{name}`" in TEXT, name
    for code in CloseCode:
        assert code == CloseCode.INTERNAL or f"| {code:d} |" in TEXT


async def test_the_example_runs() -> None:
    code = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert code is not None
    async with running_server(script=ends_after(3)) as server:
        example = code[1].replace("ws://127.0.0.1:8000/ws", server.ws_url)
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", example, stdout=asyncio.subprocess.PIPE)
        said, _ = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0
    assert len(said.split()) == 3
