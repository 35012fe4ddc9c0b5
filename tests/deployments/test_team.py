"""The server that a team shares, on Debian's PostgreSQL, Redis and HAProxy: many runs at once, and faults."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml
from team_server import (
    CHECKOUT,
    FILES,
    PUBLIC_HOST,
    SECRETS,
    TeamServer,
    Worker,
    composed,
    missing_packages,
    team_server,
    unit,
)
from waiting import until

from deployments.bootstrap import Place, place_at

RUNS = 50
# The jobs among them: to prepare a small dataset costs a third of a job under torchrun, and all are flow runs alike.
JOBS = (0, 10, 20, 24, 25, 26)
needs_packages = pytest.mark.skipif(
    bool(missing_packages()), reason=f"Debian's {', '.join(missing_packages())} are missing: make test-services"
)
SCRIPT = """
import os, time
with open(os.environ["NOTE"], "a") as note:
    note.write(os.environ["RUN_NUMBER"] + "\\n")
time.sleep(5)
"""


class Api:
    """The server as a member of the team reaches it: through the proxy, by https, with the secret."""

    def __init__(self, server: TeamServer) -> None:
        user, password = SECRETS["SECRET"].split(":")
        self._client = httpx.Client(
            base_url=server.api, verify=str(server.certificate), auth=(user, password), timeout=30, trust_env=False
        )

    def ask(self, verb: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Ask again as Prefect's own client does: what one server no longer answers the other does."""
        for attempt in range(30):
            try:
                answer = self._client.request(verb, path, json=body)
                if answer.status_code not in {502, 503}:
                    assert answer.is_success, answer.text
                    return answer.json()
            except httpx.TransportError:
                pass
            time.sleep(min(2, 0.2 * attempt))
        raise AssertionError(f"{path} is not answered")

    def flow_runs(self) -> dict[str, dict[str, Any]]:
        return {found["id"]: found for found in self.ask("POST", "/flow_runs/filter", {"limit": 200})}

    def states(self, flow_run: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("GET", f"/flow_run_states/?flow_run_id={flow_run}")
        return sorted(found, key=lambda state: state["timestamp"])

    def completed(self) -> int:
        return sum(found["state_type"] == "COMPLETED" for found in self.flow_runs().values())

    def create(self, number: int, deployment: dict[str, Any], parameters: dict[str, Any]) -> str:
        """Create a flow run; numbers give the order, so that a fault meets jobs as well as datasets."""
        scheduled = (datetime.now(UTC) - timedelta(seconds=RUNS - number)).isoformat()
        state = {"type": "SCHEDULED", "state_details": {"scheduled_time": scheduled}}
        body = {"parameters": parameters, "state": state, "idempotency_key": f"run {number}"}
        return str(self.ask("POST", f"/deployments/{deployment['id']}/create_flow_run", body)["id"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TeamServer]:
    with team_server(tmp_path_factory.mktemp("team")) as running:
        done = subprocess.run(
            [sys.executable, "-m", "deployments.bootstrap", "furnish"],
            env=running.client_environment, cwd=CHECKOUT, capture_output=True, text=True, timeout=900, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        yield running


# A drill for its length: 50 flow runs are 50 processes that import Prefect, 8 s of a processor each.
@needs_packages
@pytest.mark.services
@pytest.mark.drill
@pytest.mark.timeout(1800)
def test_nothing_is_lost_and_nothing_runs_twice_whatever_dies(server: TeamServer, tmp_path: Path) -> None:
    """44 small datasets and 6 jobs at once on two workers, each of which the faults may meet at any moment."""
    api, root, note = Api(server), tmp_path / "root", tmp_path / "note"
    first, second = (Worker(server, tmp_path, name) for name in ("first", "second"))
    try:
        first.start()
        second.start()
        ids = submit(api, tmp_path, root, note)
        assert len(ids) == RUNS

        until(lambda: api.completed() >= 5, seconds=600)
        server.kill("api-1")
        until(lambda: api.completed() >= 12, seconds=600)
        server.start_service("api-1")
        server.kill("messages")
        orphans = orphaned(api, first)  # while nothing hears of it
        server.start_service("messages")
        first.start()  # its machine is there again
        assert orphans

        until(lambda: api.completed() >= RUNS - 8, seconds=600)
        backup = tmp_path / "prefect.dump"
        back_up(server, backup)
        until(lambda: api.completed() == RUNS, seconds=600)
        assert_found_within_two_minutes(api, orphans)
        made = results(root, note)
        assert made[0] == Counter(map(str, JOBS))  # each job ran once
        assert len(made[1]) == RUNS - len(JOBS)

        restore(server, backup)
        assert api.flow_runs().keys() >= ids
        until(lambda: api.completed() >= RUNS, seconds=600)
        assert results(root, note) == made
        assert {found["state_type"] for found in api.flow_runs().values()} == {"COMPLETED"}
    finally:
        first.stop()
        second.stop()


def submit(api: Api, folder: Path, root: Path, note: Path) -> set[str]:
    text, script = folder / "text.jsonl", folder / "script.py"
    lines = [json.dumps({"text": f"This is document {number} of a small corpus."}) for number in range(200)]
    text.write_text("\n".join(lines))
    script.write_text(SCRIPT)
    dataset, job = (
        api.ask("GET", f"/deployments/name/{name}") for name in ("prepare-dataset/dataset-local", "run-torchrun/pi")
    )
    ids = set()
    for number in range(RUNS):
        if number in JOBS:
            platform = {**job["parameters"]["platform"], "nodes": 1, "processes": 1}
            env = {"NOTE": str(note), "RUN_NUMBER": str(number)}
            mine = {"name": f"job-{number}", "script": str(script), "args": [], "env": env, "platform": platform}
            ids.add(api.create(number, job, {**job["parameters"], **mine, "root": str(root)}))
        else:
            data = {
                **dataset["parameters"]["data"],
                "corpus": {"kind": "files", "paths": [str(text)]},
                "tokenizer": {"kind": "train", "vocab_size": 300, "sample_bytes": 100_000},
                "split_seed": number,
            }
            ids.add(api.create(number, dataset, {"root": str(root), "data": data}))
    return ids


def orphaned(api: Api, worker: Worker) -> dict[str, datetime]:
    """Let a worker die in the middle of its flow runs; return those, each with the time of the worker's death."""
    until(lambda: worker.flow_runs(), seconds=120)
    mine = worker.lose_power()
    died = datetime.now(UTC)
    unfinished = {"PENDING", "RUNNING"}
    return {one: died for one in mine if api.flow_runs()[one]["state_type"] in unfinished}


def assert_found_within_two_minutes(api: Api, orphans: dict[str, datetime]) -> None:
    for orphan, died in orphans.items():
        states = api.states(orphan)
        again = [state for state in states if state["name"] == "AwaitingRetry"]
        assert again, states
        assert datetime.fromisoformat(again[0]["timestamp"]) - died < timedelta(seconds=120)


def results(root: Path, note: Path) -> tuple[Counter[str], dict[Path, int]]:
    """Return how often each job ran, and when each dataset was made."""
    manifests = {path: path.stat().st_mtime_ns for path in root.glob("datasets/*/manifest.json")}
    return Counter(note.read_text().split()), manifests


def block(heading: str) -> str:
    """Return the first commands that docs/team.md gives under a heading."""
    page = (CHECKOUT / "docs" / "team.md").read_text()
    return page.split(f"## {heading}\n")[1].split("```bash\n")[1].split("```")[0]


def compose_commands(heading: str) -> list[list[str]]:
    """Return the commands under a heading, which are all of `docker compose`."""
    return [line.removeprefix("docker compose ").split() for line in block(heading).splitlines()]


def back_up(server: TeamServer, into: Path) -> None:
    [[*words, redirection, _]] = compose_commands("Backup")
    assert (words[:3], redirection) == (["exec", "-T", "database"], ">")
    with into.open("wb") as dump:
        assert server.postgres(*words[3:], stdout=dump, capture_output=False).returncode == 0


def restore(server: TeamServer, dump: Path) -> None:
    """Do what docs/team.md says, in its order, with the processes instead of containers."""
    for verb, *words in compose_commands("Restore"):
        if verb == "stop":
            for service in words:
                server.kill(service)
        elif verb == "exec":
            *words, redirection, _ = words
            assert (words[:2], redirection) == (["-T", "database"], "<")
            with dump.open("rb") as content:
                done = server.postgres(*words[2:], stdin=content)
            assert done.returncode == 0, done.stderr
        else:
            assert (verb, words[0]) == ("up", "--detach")
            server.migrate()
            for service in ("api-1", "api-2", "services"):
                server.start_service(service)
            until(lambda: server.is_ready(None), seconds=600)


# --- the front door ---------------------------------------------------------------------------------------------------


@needs_packages
@pytest.mark.services
@pytest.mark.timeout(1800)
def test_the_teams_server_lets_in_who_knows_its_secret_and_refuses_pages_and_names_of_others(
    server: TeamServer,
) -> None:
    client = httpx.Client(base_url=server.api, verify=str(server.certificate), trust_env=False, timeout=30)
    known = tuple(SECRETS["SECRET"].split(":"))
    assert client.get("/admin/version").status_code == 401
    assert client.get("/admin/version", auth=("litgpt", "a guess")).status_code == 401
    assert client.get("/admin/version", auth=known).status_code == 200
    assert client.get("/admin/version", auth=known, headers={"Origin": "https://elsewhere.example"}).status_code == 403
    assert client.get("/admin/version", auth=known, headers={"Host": "elsewhere.example"}).status_code == 400
    own = f"https://{PUBLIC_HOST}:{server.port}"
    assert client.get("/admin/version", auth=known, headers={"Origin": own}).status_code == 200
    # Probes need no secret, and show nothing.
    assert client.get("/ready").json() == {"message": "OK"}
    assert client.get("/health").json() is True
    with pytest.raises(httpx.TransportError):
        httpx.get(server.api.replace("https", "http"), timeout=10)


@needs_packages
@pytest.mark.services
@pytest.mark.timeout(1800)
def test_no_command_line_of_the_teams_server_shows_a_secret(server: TeamServer) -> None:
    for name in server.compose["services"]:
        words = " ".join(server.compose["services"][name].get("command", ()))
        assert not [secret for secret in SECRETS.values() if secret in words], name


# --- what the files say -----------------------------------------------------------------------------------------------


def test_only_the_proxy_of_the_compose_file_is_reached_from_outside() -> None:
    services = yaml.safe_load((FILES / "compose.yaml").read_text())["services"]
    assert {name for name, service in services.items() if "ports" in service} == {"proxy"}


def test_the_pages_first_step_makes_the_secrets_that_the_compose_file_asks_for(tmp_path: Path) -> None:
    subprocess.run(["bash", "-e", "-c", block("The server")], cwd=tmp_path, check=True, timeout=60)
    made = dict(line.split("=", 1) for line in (tmp_path / ".env").read_text().splitlines())
    assert (tmp_path / ".env").stat().st_mode & 0o777 == 0o600
    assert len(set(made.values())) == 4
    assert made["SECRET"] in str(composed(made)["services"]["api-1"]["environment"])


def test_images_of_others_are_pinned_by_digest() -> None:
    services = yaml.safe_load((FILES / "compose.yaml").read_text())["services"]
    images = {service["image"] for service in services.values()} - {"train-litgpt-server"}
    objects = list(yaml.safe_load_all((FILES / "kubernetes.yaml").read_text()))
    pods = [thing["spec"]["template"]["spec"] for thing in objects if "template" in thing.get("spec", {})]
    images |= {one["image"] for pod in pods for one in pod["containers"] if "train-litgpt" not in one["image"]}
    assert images
    assert all(re.fullmatch(r"[\w:.-]+@sha256:[0-9a-f]{64}", image) for image in images), images
    [base] = re.findall(r"^ARG BASE=(.*)", (FILES / "Dockerfile").read_text(), re.MULTILINE)
    assert f"ARG BASE={base}\n" in (CHECKOUT / "litgpt_demo/stacks/Dockerfile").read_text()


def test_server_and_workers_have_the_same_settings_wherever_they_run() -> None:
    composed = yaml.safe_load((FILES / "compose.yaml").read_text())["services"]
    objects = {
        (thing["kind"], thing["metadata"]["name"]): thing
        for thing in yaml.safe_load_all((FILES / "kubernetes.yaml").read_text())
    }
    settings = objects["ConfigMap", "train-litgpt-server"]["data"]
    there = {name for name in composed["services"]["environment"] if name not in settings}
    [services] = objects["Deployment", "services"]["spec"]["template"]["spec"]["containers"]
    assert there == {one["name"] for one in services["env"] if one["name"].startswith("PREFECT_")}
    same = {name: value for name, value in composed["services"]["environment"].items() if name in settings}
    own = {"PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS", "PREFECT_UI_API_URL"}
    assert {name: value for name, value in settings.items() if name not in own} == {
        name: value for name, value in same.items() if name not in own
    }
    [worker] = objects["Deployment", "worker"]["spec"]["template"]["spec"]["containers"]
    given = {one["name"]: one["value"] for one in worker["env"] if "value" in one and one["name"] != "PREFECT_API_URL"}
    assert given == dict(one.split("=", 1) for one in unit()["Environment"])
    local = Place.environment(place_at(4200))
    assert {name: local[name] for name in given if name in local and name != "PREFECT_WORKER_QUERY_SECONDS"} == {
        name: value for name, value in given.items() if name in local and name != "PREFECT_WORKER_QUERY_SECONDS"
    }


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_finds_nothing_to_say_about_the_workers_unit(tmp_path: Path) -> None:
    [started] = unit()["ExecStart"]
    copy = tmp_path / "train-litgpt-worker.service"
    text = (FILES / copy.name).read_text()
    copy.write_text(text.replace(started.split()[0], sys.executable))  # it looks whether the program is there
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_manifests_are_what_kubernetes_takes() -> None:
    for thing in yaml.safe_load_all((FILES / "kubernetes.yaml").read_text()):
        kubernetes_validate.validate(thing, "1.37", strict=True)


def test_a_worker_in_the_cluster_has_the_roles_of_the_people_and_no_other() -> None:
    objects = list(yaml.safe_load_all((FILES / "kubernetes.yaml").read_text()))
    roles = {
        (thing["kind"], thing["metadata"]["name"])
        for thing in yaml.safe_load_all((CHECKOUT / "deployments/rbac.yaml").read_text())
    }
    bindings = [thing for thing in objects if thing["kind"] in {"RoleBinding", "ClusterRoleBinding"}]
    assert bindings
    for binding in bindings:
        assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) in roles
        assert [subject["name"] for subject in binding["subjects"]] == ["train-litgpt-worker"]
    pods = {
        thing["metadata"]["name"]: thing["spec"]["template"]["spec"]
        for thing in objects
        if "template" in thing.get("spec", {})
    }
    assert pods["worker"]["serviceAccountName"] == "train-litgpt-worker"
    assert all(pod["automountServiceAccountToken"] is False for name, pod in pods.items() if name != "worker")
