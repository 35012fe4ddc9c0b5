"""A Prefect server with its UI, a work pool, a worker, deployments and automations, set up by one command.

python -m deployments.bootstrap serve    each part only if it is not there
python -m deployments.bootstrap ui       opens the browser, logged in
python -m deployments.bootstrap stop     ends the server and the worker that it started
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import socket
import subprocess
import sys
import time
import webbrowser
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import typer
import yaml

from deployments.daemons import Daemon
from flows.serving import (
    AUTH,
    ORIGINS,
    SERVER_AUTH,
    environment_file,
    login_link,
    new_secret,
    require_no_stranger,
    server_command,
    server_environment,
    serving_home,
    settings_in,
    stranger_at,
    write_settings,
)
from launcher.config import config_document, read_yaml
from launcher.errors import ConfigProblem, PlatformUnreachable
from launcher.formatting import harmless
from launcher.runs.index import Index, damaged_records, root_of
from launcher.runs.listing import run_rows
from litgpt_demo import PYTHON
from litgpt_demo.errors import TrainLitgptError
from litgpt_demo.proxies import settle_proxies
from litgpt_demo.storage.private import close_folder, write_private

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient

CHECKOUT = Path(__file__).resolve().parents[1]
PREFECT_FILE = CHECKOUT / "deployments" / "prefect.yaml"
AUTOMATIONS_FILE = CHECKOUT / "deployments" / "automations.yaml"
CONFIGS = CHECKOUT / "deployments" / "configs"
POOL = "litgpt-local"
RENAMED = {
    "prepare-dataset/local": "prepare-dataset/dataset-local",
    "sweep-litgpt/local": "sweep-litgpt/sweep-local",
    "benchmark-network/local": "benchmark-network/network-local",
}
"""A deployment's name of before to its name of now; Prefect's UI lists deployments by their last parts."""

# Seconds between two signs of life of a Prefect worker (PREFECT_WORKER_HEARTBEAT_SECONDS).
_BEAT = 30.0
# A fresh database is migrated first, which alone takes 15 s on two idle cores.
_STARTUP_SECONDS = 180.0

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)


@dataclass(frozen=True, kw_only=True)
class Place:
    """The address of the server, and the folders in which it and the worker keep their files."""

    port: int
    home: Path

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    @property
    def ui(self) -> str:
        """The second of the server's two UIs, which alone draws charts. Without this, Prefect names the first."""
        return f"http://127.0.0.1:{self.port}/v2"

    @property
    def environment_file(self) -> Path:
        return environment_file(self.home)

    @property
    def server(self) -> Daemon:
        return Daemon(name="server", folder=self.home / "serve")

    @property
    def worker(self) -> Daemon:
        return Daemon(name="worker", folder=self.home / "serve")

    def environment(self) -> dict[str, str]:
        """Prefect's settings for everything that is started here."""
        return {
            "PREFECT_HOME": str(self.home),
            "PREFECT_API_URL": self.api,
            "PREFECT_UI_URL": self.ui,  # in the addresses that the worker and its flow runs log
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
            "DO_NOT_TRACK": "1",
            # Retries wait 1, 2, 4, … s: 9 of them outlive a server that is away for a quarter of an hour.
            "PREFECT_CLIENT_MAX_RETRIES": "9",
            "PREFECT_WORKER_QUERY_SECONDS": "2",  # a person waits for the run to begin
            # After a server's death a flow run's process may hear of no cancellation any more. It crashes then, and the
            # automation resume-crashed starts one that hears, which takes the job up.
            "PREFECT_RUNNER_CRASH_ON_CANCELLATION_FAILURE": "true",
        }


def main() -> None:
    """A known error is a message; a traceback is for errors that are ours."""
    try:
        settle_proxies(os.environ)
        app()
    except TrainLitgptError as error:
        sys.exit(f"error: {error}")


Port = Annotated[int, typer.Option(help="Where the server listens.")]
Silence = Annotated[
    int | None,
    typer.Option(
        help="Seconds without a sign of life after which a run counts as crashed.", min=60, show_default="1200"
    ),
]


@app.command()
def serve(
    port: Port = 4200,
    silence: Silence = None,
    renew: Annotated[bool, typer.Option("--renew", help="Deploy again; what was edited in the UI is lost.")] = False,
) -> None:
    """Start server, work pool, worker, deployments and automations, each only if it is not there."""
    place = place_at(port)
    os.environ |= place.environment()  # before Prefect is imported, which reads its settings then
    _report("server", _started(start_server(place)), place.ui)
    asyncio.run(furnish(place, silence=silence, renew=renew))
    stop, show = (
        f"make {verb}" if port == 4200 else f"python -m deployments.bootstrap {verb}" for verb in ("stop", "ui")
    )
    page, export = f"{place.ui}. ", f"export PREFECT_API_URL={place.api} PREFECT_UI_URL={place.ui}"
    if place.server.process() is not None:  # else the server is somebody's own
        # Only a person is shown the secret: output that goes to a file or a CI's log is read by others.
        secret = os.environ[AUTH] if sys.stdout.isatty() else f"{AUTH} in {place.environment_file}"
        page = f"{place.ui}: `{show}` opens it logged in; elsewhere its password is\n\n    {secret}\n\n"
        export = f". {shlex.quote(str(place.environment_file))}"
    typer.echo(
        f"\nThe UI is at {page}In your shell:\n\n"
        f"    {export}\n"
        f"    prefect deployment run 'train-litgpt/local'\n"
        f"    train-litgpt submit local train.learning_rate=3e-4\n\n"
        f"`{stop}` ends server and worker; their logs are in {place.server.folder}."
    )


@app.command()
def ui() -> None:
    """Open the UI of the server that `serve` started, logged in."""
    place = place_at(_port_of(place_at(4200).server))
    if (secret := _known_secret(place)) is None:
        webbrowser.open(place.ui)
        return
    # The link is in a file, for a command line can be read by every user of this machine.
    page = place.server.folder / "ui.html"
    write_private(page, f'<meta http-equiv="refresh" content="0; url={login_link(place.port, secret)}">\n')
    webbrowser.open(page.as_uri())


@app.command()
def stop() -> None:
    """End the server and the worker that `serve` started. Jobs go on by themselves; those that do are named."""
    place = place_at(_port_of(place_at(4200).server))
    os.environ |= place.environment()
    from flows.server import use_secret

    theirs = stranger_at(place.port) is not None
    if not theirs:
        use_secret()
    os.chdir(CHECKOUT)  # relative roots are the worker's
    indexes = [Index.of(root) for root in sorted({root_of({})} if theirs else asyncio.run(roots(place)))]
    for daemon in (place.worker, place.server):
        _report(daemon.name, "stopped" if daemon.stop() else "not running", "")
    for index in indexes:
        for row in run_rows(index, bad=(bad := damaged_records())):
            if row.live:
                cancel = f"train-litgpt cancel {row.run} --root {index.root.address()}"
                _report("job", "goes on", f"{row.run} ({row.platform}, {row.state}); to end it: {cancel}")
        if bad.count:
            _report("job", "unknown", str(bad))


def _port_of(server: Daemon) -> int:
    """The port that a running server was told to listen on; the usual one where none runs."""
    process = server.process()
    words = process.cmdline() if process else []
    return int(words[words.index("--port") + 1]) if "--port" in words else 4200


async def roots(place: Place) -> set[str]:
    """Return the roots that flow runs of this server wrote under lately, and the default one."""
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.sorting import FlowRunSort

    found = {root_of({})}
    if not answers(place):
        return found
    with contextlib.suppress(httpx.HTTPError):
        async with get_client() as client:
            for flow_run in await client.read_flow_runs(sort=FlowRunSort.EXPECTED_START_TIME_DESC, limit=200):
                found.add(root_of(flow_run.parameters))
    return found


def place_at(port: int) -> Place:
    """Return the place on `port`, with its files in PREFECT_HOME or, without one, next to the code."""
    return Place(port=port, home=serving_home())


def _report(part: str, what: str, which: str) -> None:
    typer.echo(harmless(f"{part:<12} {what:<12} {which}".rstrip()))


def _started(new: bool) -> str:
    return "started" if new else "there"


# --- server and worker ------------------------------------------------------------------------------------------------


def start_server(place: Place) -> bool:
    """Make sure that a server runs at `place`; return True if it had to be started.

    Raises:
        ConfigProblem: something else or somebody else listens there, or this home's server listens elsewhere.
        PlatformUnreachable: it does not come up.
    """
    require_no_stranger(place.port)
    live = place.server.process()
    if answers(place):
        if live is not None:
            _require_admission(place)
        return False
    if live is not None and str(place.port) not in live.cmdline():
        raise ConfigProblem(
            f"a server with its data in {place.home} runs already, not on port {place.port}; "
            "end it with `python -m deployments.bootstrap stop`, or set PREFECT_HOME to another folder"
        )
    if live is None:
        if _in_use(place.port):
            raise ConfigProblem(
                f"port {place.port} is in use, and not by a Prefect server; end what listens there, or choose another: "
                "python -m deployments.bootstrap serve --port 4300"
            )
        _start_locked(place)
    _wait(lambda: answers(place), place.server)
    require_no_stranger(place.port)  # who was there before our server died of it
    _require_admission(place)
    return True


def _start_locked(place: Place) -> None:
    """Start a server that asks for the user's own secret, the one of before, or a new one, and keep it in a file."""
    given = _users_settings()
    secret = given.get(SERVER_AUTH) or _known_secret(place) or new_secret()
    close_folder(place.home)
    addresses = {"PREFECT_API_URL": place.api, "PREFECT_UI_URL": place.ui}
    write_settings(place.environment_file, {**addresses, AUTH: secret})
    environment = server_environment(place.port, secret)
    if ORIGINS in given:
        environment[ORIGINS] = given[ORIGINS]
    place.server.start(server_command(place.port, log_level="warning"), env={**os.environ, **environment}, cwd=CHECKOUT)


def _require_admission(place: Place) -> None:
    """Use the server's secret from now on, in this process and those that it starts.

    Raises:
        ConfigProblem: the server asks for none, or for another one than we know.
    """
    from prefect.context import refresh_global_settings_context

    if _lets_in(place, secret=""):
        raise ConfigProblem(
            f"the server at {place.api} was started without a secret, and every page that a browser here shows may use "
            "it; end it with `python -m deployments.bootstrap stop`, then serve again"
        )
    secret = _known_secret(place) or ""
    if not _lets_in(place, secret=secret):
        raise ConfigProblem(
            f"the server at {place.api} asks for another secret than {AUTH} in your settings or, without one there, "
            f"in {place.environment_file}; correct it, or end the server with `python -m deployments.bootstrap stop`"
        )
    os.environ[AUTH] = secret
    refresh_global_settings_context()


def _known_secret(place: Place) -> str | None:
    """Return the secret of the user's own settings or, without one, of the server that was started here."""
    return _users_settings().get(AUTH) or settings_in(place.environment_file).get(AUTH)


def _users_settings() -> dict[str, str]:
    """Return what the user has set of Prefect's settings, by variables, in a profile or in prefect.toml."""
    from prefect.settings import get_current_settings

    return get_current_settings().to_environment_variables(exclude_unset=True)


def _lets_in(place: Place, *, secret: str) -> bool:
    """Return whether the server answers who knows this secret; "" is none."""
    headers = {"Authorization": f"Basic {b64encode(secret.encode()).decode()}"} if secret else {}
    try:
        with urlopen(Request(f"{place.api}/admin/version", headers=headers), timeout=30):
            return True
    except HTTPError as error:
        if error.code != HTTPStatus.UNAUTHORIZED:
            raise
        return False


def answers(place: Place) -> bool:
    """Return True if there is a Prefect server."""
    try:
        with urlopen(f"{place.api}/health", timeout=5) as answer:
            return bool(answer.read() == b"true")
    except (URLError, OSError, ValueError):
        return False


def _in_use(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _prefect(*arguments: str) -> list[str]:
    return [*PYTHON, "-m", "prefect", "--no-prompt", *arguments]


def _wait(ready: Callable[[], bool], daemon: Daemon) -> None:
    """Until it is ready.

    Raises:
        PlatformUnreachable: it died, or takes too long; says what it said last.
    """
    give_up = time.monotonic() + _STARTUP_SECONDS
    while not ready():
        if daemon.process() is None:
            raise PlatformUnreachable(f"the {daemon.name} died at once; {daemon.log} ends with:\n{daemon.last_words()}")
        if time.monotonic() > give_up:
            raise PlatformUnreachable(f"the {daemon.name} is not up after {_STARTUP_SECONDS:.0f} s; see {daemon.log}")
        time.sleep(0.3)


# --- what is in the server --------------------------------------------------------------------------------------------


async def furnish(place: Place, *, silence: int | None, renew: bool) -> None:
    """Create work pool, worker, deployments and automations, and say of each whether it was there."""
    from prefect.client.orchestration import get_client

    from flows.reconciling import reap_jobs

    async with get_client() as client:
        _report("work pool", _created(await create_pool(client)), POOL)
        worker = await have_worker(client, place.worker)
        names = deployment_names()
        missing = [name for name in names if renew or not await is_deployed(client, name)]
        deploy(missing)
        for name in names:
            _report("deployment", _created(name in missing), name)
        for old, new in RENAMED.items():
            if (became := await remove_renamed(client, old)) is not None:
                _report("deployment", became, f"{old}, now {new}")
        for automation in automations(silence=silence):
            created = await create_automation(client, automation)
            _report("automation", _created(created), automation["name"])
        await _heard(client, place.worker, within=_STARTUP_SECONDS)
        _report("worker", worker, f"on {socket.gethostname()}")
        for reaped in await reap_jobs(client):
            _report("job", "reaped", str(reaped))


def _created(new: bool) -> str:
    return "created" if new else "there"


async def create_pool(client: PrefectClient) -> bool:
    """Returns whether it was not there."""
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists

    about = "Flow runs as processes of this machine"
    try:
        await client.create_work_pool(WorkPoolCreate(name=POOL, type="process", description=about))
    except ObjectAlreadyExists:
        return False
    return True


async def is_deployed(client: PrefectClient, name: str) -> bool:
    """Return True if FLOW/DEPLOYMENT is there."""
    from prefect.exceptions import ObjectNotFound

    try:
        await client.read_deployment_by_name(name)
    except ObjectNotFound:
        return False
    return True


def deployment_names() -> list[str]:
    """FLOW/DEPLOYMENT of everything in prefect.yaml. Our flows are named as their functions, with dashes."""
    return [
        f"{deployment['entrypoint'].rsplit('.', 1)[-1].replace('_', '-')}/{deployment['name']}"
        for deployment in read_yaml(PREFECT_FILE)["deployments"]
    ]


async def remove_renamed(client: PrefectClient, old: str) -> str | None:
    """Remove a deployment that we made under a name of before; returns what became of it, None if it is not there.

    It is kept where that would take something away: a run needs it to be cancelled or resumed, a schedule goes with it.
    """
    from prefect.client.schemas import filters
    from prefect.client.schemas.objects import TERMINAL_STATES
    from prefect.exceptions import ObjectNotFound

    try:
        found = await client.read_deployment_by_name(old)
    except ObjectNotFound:
        return None
    if found.work_pool_name != POOL or "litgpt" not in found.tags:
        return None  # somebody else's
    mine = filters.DeploymentFilter(id=filters.DeploymentFilterId(any_=[found.id]))
    live = filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(not_any_=list(TERMINAL_STATES)))
    runs = await client.read_flow_runs(
        deployment_filter=mine, flow_run_filter=filters.FlowRunFilter(state=live), limit=1
    )
    if found.schedules or runs:
        return "kept"
    await client.delete_deployment(found.id)
    return "removed"


def deploy(names: Sequence[str]) -> None:
    """Deploy these FLOW/DEPLOYMENTs by Prefect's own command, so that prefect.yaml means what Prefect says it means.

    Raises:
        ConfigProblem: Prefect refuses.
    """
    if not names:
        return
    # By the deployments' names alone: it finds FLOW/DEPLOYMENT only where entrypoints name files.
    chosen = [part for name in names for part in ("--name", name.partition("/")[2])]
    command = _prefect("deploy", *chosen, "--prefect-file", str(PREFECT_FILE.relative_to(CHECKOUT)))
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConfigProblem(f"`prefect deploy` refused {PREFECT_FILE}:\n{done.stdout}{done.stderr}")


def automations(*, silence: int | None) -> list[dict[str, Any]]:
    """Those of automations.yaml, proactive ones waiting `silence` seconds instead of what the file says."""
    found: list[dict[str, Any]] = yaml.safe_load(AUTOMATIONS_FILE.read_text())
    for automation in found:
        if silence is not None and automation["trigger"]["posture"] == "Proactive":
            automation["trigger"]["within"] = silence
    return found


async def create_automation(client: PrefectClient, automation: Mapping[str, Any]) -> bool:
    """Returns whether it was not there."""
    from prefect.events.schemas.automations import AutomationCore

    if await client.read_automations_by_name(automation["name"]):
        return False
    actions = [await _with_id(client, action) for action in automation["actions"]]
    await client.create_automation(AutomationCore.model_validate({**automation, "actions": actions}))
    return True


async def _with_id(client: PrefectClient, action: Mapping[str, Any]) -> dict[str, Any]:
    """An action that runs a deployment, which automations.yaml names and Prefect knows by its id."""
    if "deployment" not in action:
        return dict(action)
    found = await client.read_deployment_by_name(action["deployment"])
    return {name: value for name, value in action.items() if name != "deployment"} | {"deployment_id": str(found.id)}


async def have_worker(client: PrefectClient, worker: Daemon) -> str:
    """Make sure that a worker polls, and return what was done for it. A worker that lives but fell silent is replaced.

    Its flow runs crash with it and are resumed by the automation, where they take up their jobs.
    """
    there = worker.process() is not None
    if there and await _heard(client, worker, within=_BEAT + 15):
        return "there"
    if there:
        worker.stop()
    command = ["worker", "start", "--pool", POOL, "--type", "process", "--name", socket.gethostname()]
    worker.start(_prefect(*command), env=os.environ, cwd=CHECKOUT)
    return "replaced" if there else "started"


async def _heard(client: PrefectClient, worker: Daemon, *, within: float) -> bool:
    """Return whether the server has heard of this worker lately, or does within some seconds."""
    process = worker.process()
    since = max(process.create_time() if process else 0.0, time.time() - 2 * _BEAT)
    give_up = time.monotonic() + within
    while True:
        beats = [found.last_heartbeat_time for found in await client.read_workers_for_work_pool(POOL)]
        if any(beat is not None and beat.timestamp() >= since for beat in beats):
            return True
        if time.monotonic() > give_up:
            return False
        await asyncio.sleep(0.3)


# --- prefect.yaml -----------------------------------------------------------------------------------------------------


def settings(flow: str, config: str, platform: str | None = None) -> dict[str, Any]:
    """Return the whole settings of a config as the parameters of a flow: a build step of prefect.yaml.

    All of them: Prefect's form shows what a deployment stores, and a section that is given replaces the stored one.

    Args:
        platform: a profile, such as `profiles/gke.yaml`, as `--platform` takes one.
    """
    from flows.submission import parameters_with

    profile = None if platform is None else CONFIGS / platform
    return parameters_with(flow, config_document(CONFIGS / config, profile=profile), {})


if __name__ == "__main__":
    main()
