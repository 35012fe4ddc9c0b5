"""What a team's server and its workers are made of, as the files in deployments/server say it."""

from __future__ import annotations

import configparser
import re
import shlex
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from kubernetes_cluster.schemas import shape_troubles
from prefect.settings import Settings
from prefect.settings.legacy import _get_valid_setting_names
from prefect_redis.client import RedisMessagingSettings

SERVER = Path("deployments/server")
COMPOSE: dict[str, Any] = yaml.safe_load((SERVER / "compose.yaml").read_text())
WORKERS: dict[str, Any] = yaml.safe_load((SERVER / "worker.yaml").read_text())
[CONTAINER] = WORKERS["spec"]["template"]["spec"]["containers"]


def unit() -> configparser.SectionProxy:
    parsed = configparser.RawConfigParser()
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read(SERVER / "train-litgpt-worker.service")
    return parsed["Service"]


def in_unit() -> dict[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(unit()["Environment"]))


def in_pods() -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in CONTAINER["env"]}


@pytest.mark.parametrize("arguments", [COMPOSE["x-prefect"]["environment"], in_unit(), in_pods()])
def test_each_setting_is_one_that_prefect_knows(arguments: dict[str, str]) -> None:
    """Prefect says nothing of a variable that it does not know, and goes on without it."""
    redis = {f"PREFECT_REDIS_MESSAGING_{name.upper()}" for name in RedisMessagingSettings.model_fields}
    assert {name for name in arguments if name.startswith("PREFECT_")} <= redis | _get_valid_setting_names(Settings)


def test_server_has_the_prefect_of_its_workers() -> None:
    """Every service but that of the timetables has a health check."""
    services = COMPOSE["services"]
    assert COMPOSE["x-prefect"]["image"] == f"prefecthq/prefect:{version('prefect')}-python3.11"
    assert Path("deployments/Dockerfile").read_text().count(f"FROM {COMPOSE['x-prefect']['image']}") == 1
    silent = {name for name, service in services.items() if "healthcheck" not in service}
    assert silent == {"services", "migrate"}
    assert [name for name, service in services.items() if "ports" in service] == ["door"]


def test_workers_in_a_cluster_are_started_as_those_of_a_machine() -> None:
    assert shape_troubles(WORKERS) == []
    text = shlex.split(unit()["ExecStart"].removeprefix(f"{unit()['WorkingDirectory']}/.venv/bin/"))
    assert CONTAINER["args"][: len(text) - 2] == text[:-2]
    assert in_pods() == in_unit()


def test_workers_run_without_root_or_capabilities() -> None:
    image = Path("deployments/Dockerfile").read_text()
    assert image.index("USER 1000\n") > image.index("RUN pip install"), "packages are not the user's to change"
    assert WORKERS["spec"]["template"]["spec"]["securityContext"]["runAsUser"] == 1000
    prefixes = ("Cap", "NoNew", "Protect", "Restrict")
    hardened = {name: value for name, value in unit().items() if name.startswith(prefixes)}
    assert hardened.pop("CapabilityBoundingSet") == ""
    assert hardened.pop("ProtectSystem") == "full"
    assert {*hardened.values()} == {"true"}
    assert {"User", "NoNewPrivileges", "RestrictSUIDSGID"} <= {*unit()}


def test_redis_asks_for_a_password() -> None:
    settings, redis = COMPOSE["x-prefect"]["environment"], COMPOSE["services"]["redis"]
    for name in ("PREFECT_REDIS_MESSAGING_URL", "PREFECT_SERVER_DOCKET_URL"):
        assert urlsplit(settings[name].replace(":?of letters and digits", "")).password == "${REDIS_PASSWORD}"
    assert redis["command"].endswith(" --requirepass ${REDIS_PASSWORD}")
    assert redis["environment"] == {"REDISCLI_AUTH": "${REDIS_PASSWORD}"}, "its health check would be refused"


def test_orchestrators_image_has_each_extra_it_needs() -> None:
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    [installed] = re.findall(r'"\.\[(.*)\]"', Path("deployments/Dockerfile").read_text())
    # Of a node's GPU, of the server, of those who hold keys, and of those who work on train-litgpt.
    assert {*installed.split(",")} == extras.keys() - {"float8", "sign", "team", "croissant", "dev", "docs", "bench"}
