"""The JSON schema of every frame, generated from their definitions: `python -m chatserve.server.schema FILE`.

`$defs/ClientFrame` is what a client may send, `$defs/ServerFrame` what it may get. Objects are open: both sides ignore
fields that they do not know.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
from msgspec import UNSET

from chatserve.server.frames import PROTOCOL, AnyClientFrame, AnyServerFrame

_CLIENT: Final[tuple[type[msgspec.Struct], ...]] = get_args(AnyClientFrame)
_SERVER: Final[tuple[type[msgspec.Struct], ...]] = get_args(AnyServerFrame)


def build_schema() -> dict[str, Any]:
    _, definitions = msgspec.json.schema_components((*_CLIENT, *_SERVER), ref_template="#/$defs/{name}")
    for frame in _SERVER:
        # What has a default in our code is still always sent, unless the default means its absence.
        sent = [field.encode_name for field in msgspec.structs.fields(frame) if field.default is not UNSET]
        definitions[frame.__name__]["required"] = ["type", *sent]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": PROTOCOL,
        "description": "The frames of ChatServe's WebSocket protocol; docs/protocol.md says what they mean.",
        "anyOf": [{"$ref": "#/$defs/ClientFrame"}, {"$ref": "#/$defs/ServerFrame"}],
        "$defs": {
            "ClientFrame": {"anyOf": [{"$ref": f"#/$defs/{frame.__name__}"} for frame in _CLIENT]},
            "ServerFrame": {"anyOf": [{"$ref": f"#/$defs/{frame.__name__}"} for frame in _SERVER]},
            **definitions,
        },
    }


def schema_text() -> str:
    return msgspec.json.format(msgspec.json.encode(build_schema()), indent=2).decode() + "\n"


def main() -> int:
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m chatserve.server.schema FILE\n")
        return 2
    Path(sys.argv[1]).write_text(schema_text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
