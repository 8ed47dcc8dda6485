"""The container files: valid, and as safe and as durable as they say.

`compose_spec.json` is the schema of the Compose specification as Docker Compose ships it (Apache-2.0).
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from chatserve import cli

ROOT = Path(__file__).resolve().parent.parent.parent


def compose() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def known_variables() -> set[str]:
    return {str(option.envvar) for option in cli.serve.params if getattr(option, "envvar", None)}


def test_compose_file_is_valid() -> None:
    schema = json.loads(Path(__file__).with_name("compose_spec.json").read_text())
    jsonschema.Draft201909Validator(schema).validate(compose())
    if (
        shutil.which("docker")
        and subprocess.run(["docker", "compose", "version"], check=False, capture_output=True).returncode == 0
    ):
        subprocess.run(["docker", "compose", "config", "--quiet"], cwd=ROOT, check=True, timeout=60)


def test_compose_publishes_on_loopback_only() -> None:
    published = [port for service in compose()["services"].values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_compose_keeps_conversations_in_an_append_only_file_on_a_volume() -> None:
    redis = compose()["services"]["redis"]
    command = redis["command"]
    assert command[command.index("--appendonly") + 1] == "yes"
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"
    assert redis["volumes"] == ["redis:/data"]
    assert {volume.split(":")[0] for each in compose()["services"].values() for volume in each["volumes"]} <= set(
        compose()["volumes"]
    )


def test_compose_waits_for_a_healthy_redis_and_checks_the_server() -> None:
    server = compose()["services"]["server"]
    assert server["depends_on"]["redis"]["condition"] == "service_healthy"
    assert "/readyz" in server["healthcheck"]["test"][-1]
    assert all("healthcheck" in each for each in compose()["services"].values())


def test_container_variables_are_the_programs_own() -> None:
    set_by_image = re.findall(r"\b(CHATSERVE_[A-Z_]+)=", (ROOT / "Dockerfile").read_text())
    assert set_by_image
    assert {*set_by_image, *compose()["services"]["server"]["environment"]} <= known_variables()


def test_the_image_runs_as_nobody_special_and_copies_what_exists() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users[-1] not in {"root", "0"}
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(copied) == kept
    assert all((ROOT / name).exists() for name in copied)
    assert any(line.startswith("HEALTHCHECK ") for line in lines)
