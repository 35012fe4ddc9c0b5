"""A Prefect server with its UI, a work pool, a worker, deployments and automations, by Prefect's own commands."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import psutil
import typer

from flows import serving
from flows.serving import AUTH, CHECKOUT, ORIGINS, SERVER_AUTH, environment_file, serving_home, settings_in
from launcher.errors import ConfigProblem
from launcher.formatting import harmless
from litgpt_demo import PYTHON
from litgpt_demo.secrets import is_protected
from litgpt_demo.storage.private import close_folder, write_private

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient

NOTICES = "train-litgpt-notices"  # the webhook block in Prefect that knows where they go
NOTIFY = "TRAIN_LITGPT_NOTIFY_URL"
PREFECT_FILE = CHECKOUT / "deployments" / "prefect.yaml"
AUTOMATIONS_FILE = CHECKOUT / "deployments" / "automations.yaml"
CONFIGS = CHECKOUT / "deployments" / "configs"
POOL = "litgpt-local"

_STARTUP = 180.0  # seconds: a fresh database is migrated first, which takes 15 s on two idle cores
_GRACE = 20.0  # seconds between SIGTERM and SIGKILL: a Prefect server takes 3 to end


def serve(port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the server on 127.0.0.1.")] = 4200) -> None:
    """Start Prefect's server with its UI and a worker unless they run, and update the deployments and automations."""
    notify = _notify()
    home, api = serving_home(), f"http://127.0.0.1:{port}/api"
    is_served = _is_served(port)
    # The second of the server's two UIs: only this one draws charts. Without this, Prefect names the first.
    file, ui = environment_file(home), f"http://127.0.0.1:{port}/v2"
    secret = os.environ.get(SERVER_AUTH) or os.environ.get(AUTH) or settings_in(file).get(AUTH) or serving.new_secret()
    addresses = {"PREFECT_API_URL": api, "PREFECT_UI_URL": ui, AUTH: secret, "DO_NOT_TRACK": "1"}
    own_origins = {name: os.environ[name] for name in (ORIGINS,) if name in os.environ}
    close_folder(home)
    os.environ |= environment(home) | addresses
    from flows.server import require_server  # only now: Prefect reads its settings when it is imported

    log = file.with_name("server.log")
    if not is_served:
        _start(
            "server", serving.server_command(port, app="server"), serving.server_environment(port, secret) | own_origins
        )
    give_up_at = time.monotonic() + _STARTUP
    while prefect("server", "status", "--wait", "--timeout", "5", check=False) != 0:
        if serving.live("server") is None:  # something else may use its port
            raise ConfigProblem(f"Prefect's server ended; {log} ends with:\n{log.read_text().strip()[-200:]}")
        if time.monotonic() > give_up_at:
            what = f"Prefect's server does not answer at {api} after {_STARTUP:.0f} s"
            raise ConfigProblem(what, fix=f"read {log}, and run `train-litgpt stop` before the next try")
    write_private(file, "".join(f"export {name}={shlex.quote(value)}\n" for name, value in addresses.items()))
    _report("server", "running" if is_served else "started", ui)
    require_server()
    _deploy()
    is_working = serving.live("worker") is not None
    if not is_working:
        arguments = ("worker", "start", "--pool", POOL, "--name", socket.gethostname())
        _start("worker", [*PYTHON, "-m", "prefect", "--no-prompt", *arguments])
    _report("worker", "running" if is_working else "started", f"on {socket.gethostname()}")
    asyncio.run(_bring_up_to_date(notify))
    # Only a person is shown the secret: output that goes to a file or a CI's log is read by others.
    shown = secret if sys.stdout.isatty() else f"{AUTH} in {file}"
    typer.echo(
        f"\nThe UI is at {ui}; its password is\n\n    {shown}\n\n"
        f"In your shell:\n\n"
        f"    . {shlex.quote(str(file))}\n"
        f"    prefect deployment run 'train-litgpt/local'\n"
        f"    train-litgpt submit local train.max_steps=100\n\n"
        f"`train-litgpt stop` ends server and worker; their logs are in {file.parent}."
    )


def _is_served(port: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        process = serving.live("server")
        if process is not None:
            command = process.cmdline()
            used = int(command[command.index("--port") + 1])
            if used != port:
                fix = f"use it with `train-litgpt serve --port {used}`, or end it with `train-litgpt stop`"
                raise ConfigProblem(f"the server of {serving_home()} already listens on port {used}", fix=fix)
            return True
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        what = f"port {port} of this machine is in use by a program that `train-litgpt serve` did not start"
        free = f"take another port, as `train-litgpt serve --port {port + 100}` (`make serve PORT={port + 100}`)"
        raise ConfigProblem(f"{what} ({error.strerror})", fix=free) from None
    return False


def deploy() -> None:
    """Update the work pool, the deployments and the automations of a team's Prefect server, that of PREFECT_API_URL."""
    from prefect.settings import get_current_settings

    from flows.server import require_server

    notify = _notify()
    require_server()
    os.environ |= get_current_settings().to_environment_variables(exclude_unset=True)  # for Prefect's command line
    _deploy()
    asyncio.run(_bring_up_to_date(notify))


def _notify() -> str:
    notify = os.environ.pop(NOTIFY, "")  # no process that is started here needs it, and who has it may write there
    if notify and not notify.startswith(("https://", "http://")):
        raise ConfigProblem(f"{NOTIFY} is not the address of a webhook", fix="give one that begins with https://")
    if notify and not is_protected(notify):  # the address is a secret, and a notice has words of logs
        what = f"{NOTIFY} begins with http:// and leads to another machine, so that every host on the way could read it"
        raise ConfigProblem(what, fix="give an address that begins with https://")
    return notify


def _deploy() -> None:
    pool = prefect("work-pool", "inspect", POOL, check=False) == 0
    if not pool:
        prefect("work-pool", "create", POOL, "--type", "process")
    _report("work pool", "exists" if pool else "created", POOL)
    prefect("deploy", "--all", "--prefect-file", str(PREFECT_FILE))
    _report("deployments", "up to date", str(PREFECT_FILE.relative_to(CHECKOUT)))


def stop() -> None:
    """End the server and the worker that `serve` started. Jobs continue, and the command names them."""
    from launcher.runs.index import DamagedRecords, Index
    from launcher.runs.listing import run_rows

    os.environ |= environment(serving_home())
    with suppress(psutil.Error, OSError):  # relative roots are the worker's
        worker = serving.live("worker")
        os.chdir(serving.workplace() if worker is None else worker.cwd())
    indexes = [Index.of(root) for root in sorted(asyncio.run(_roots()))]
    for name in ("worker", "server"):
        _report(name, "stopped" if _end(name) else "not running", "")
    for index in indexes:
        bad = DamagedRecords()
        for row in run_rows(index, bad=bad):
            if row.is_live:
                cancel = f"train-litgpt cancel {row.run} --root {index.root.address()}"
                _report("job", "continues", f"{row.run} ({row.platform}, {row.state}); to end it: {cancel}")
        if bad:
            _report("job", "unknown", str(bad))


def _report(part: str, what: str, which: str) -> None:
    typer.echo(harmless(f"{part:<12} {what:<12} {which}".rstrip()))


def environment(home: Path) -> dict[str, str]:
    """Return Prefect's settings for everything that is started here, the address and the secret that were kept too."""
    own = {name: value for name, value in serving.PREFECT_SETTINGS.items() if name not in os.environ}
    # Retries wait 1, 2, 4, … s: 9 of them outlive a server that is away for a quarter of an hour.
    fixed = {"PREFECT_HOME": str(home), "DO_NOT_TRACK": "1", "PREFECT_CLIENT_MAX_RETRIES": "9"}
    return own | settings_in(environment_file(home)) | fixed


def prefect(*arguments: str, check: bool = True) -> int:
    command = [*PYTHON, "-m", "prefect", "--no-prompt", *arguments]
    done = subprocess.run(command, cwd=serving.workplace(), capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        raise ConfigProblem(f"`prefect {shlex.join(arguments)}` failed:\n{(done.stdout + done.stderr).strip()}")
    return done.returncode


def _start(name: str, command: Sequence[str], more: Mapping[str, str] = MappingProxyType({})) -> None:
    from litgpt_demo.heartbeat import started

    log = serving.kept_file(f"{name}.log")
    close_folder(log.parent)
    log.touch(mode=0o600)
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, env={**os.environ, **more}, cwd=serving.workplace(), start_new_session=True, umask=0o077,
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    write_private(serving.kept_file(f"{name}.pid"), f"{process.pid} {started(process.pid)}\n")


def _end(name: str) -> bool:
    lived, give_up_at = False, time.monotonic() + _GRACE
    while (process := serving.live(name)) is not None:
        with suppress(psutil.NoSuchProcess):
            if not lived:
                process.terminate()
            elif time.monotonic() > give_up_at:
                process.kill()
        lived = True
        time.sleep(0.1)
    return lived


async def _bring_up_to_date(notify: str) -> None:
    import yaml
    from prefect.blocks.webhook import Webhook
    from prefect.client.orchestration import get_client

    from flows.reconciling import end_orphaned_jobs, mark_dead_flow_runs

    async with get_client() as client:
        if notify:
            block = Webhook.model_validate({"url": notify, "headers": {"Content-Type": "application/json"}})
            await block.asave(NOTICES, overwrite=True)
        for automation in yaml.safe_load(AUTOMATIONS_FILE.read_text()):
            _report("automation", await put_automation(client, automation), automation["name"])
        for name in await mark_dead_flow_runs(client):
            _report("flow run", "crashed", f"{name}: its orchestrator is dead; a deployment's is started again")
    for jobs in await end_orphaned_jobs():
        _report("job", "cancelled", str(jobs))


async def put_automation(client: PrefectClient, automation: Mapping[str, Any]) -> str:
    """Create or change the automation of this name, and return which. One that is off stays off, and one that calls a
    webhook is not created without an address."""
    from prefect.events.schemas.automations import AutomationCore
    from prefect.exceptions import ObjectNotFound

    actions = [dict(action) for action in automation["actions"]]
    for action in actions:
        if "deployment" in action:  # which automations.yaml names, and Prefect knows by its id
            found = await client.read_deployment_by_name(action.pop("deployment"))
            action["deployment_id"] = str(found.id)
        if action["type"] == "call-webhook":
            try:
                block = await client.read_block_document_by_name(NOTICES, block_type_slug="webhook")
            except ObjectNotFound:
                return "off"
            action["block_document_id"] = str(block.id)
    wanted = AutomationCore.model_validate({**automation, "actions": actions})
    existing = await client.read_automations_by_name(automation["name"])
    if not existing:
        await client.create_automation(wanted)
        return "created"
    wanted = wanted.model_copy(update={"enabled": existing[0].enabled})
    if AutomationCore.model_validate(existing[0].model_dump(include=set(AutomationCore.model_fields))) == wanted:
        return "exists"
    await client.update_automation(existing[0].id, wanted)
    return "updated"


async def _roots() -> set[str]:
    import httpx
    from prefect.client.orchestration import get_client

    from flows.parameters import root_of
    from flows.reconciling import all_flow_runs

    roots = {root_of({})}
    if not os.environ.get("PREFECT_API_URL"):
        return roots
    with suppress(httpx.HTTPError, RuntimeError):
        async with get_client(httpx_settings={"timeout": 5.0}) as client:
            if await client.api_healthcheck() is None:
                roots |= {root_of(flow_run.parameters) for flow_run in await all_flow_runs(client)}
    return roots


def settings(flow: str, config: str, platform: str | None = None) -> dict[str, Any]:
    """Return all settings of a config as the parameters of a flow, for prefect.yaml, and `try_it`: Markdown for the
    deployment's description. A section of a flow run replaces the stored section."""
    from flows.parameters import KINDS, parameters_with
    from launcher.config import config_document, validated

    platform_file = None if platform is None else CONFIGS / platform
    parameters = parameters_with(flow, config_document(CONFIGS / config, platform_file=platform_file), {})
    changes: dict[str, Any] = {"name": "first-try"}
    if "train" in parameters:
        changes |= {"data.corpus": {"kind": "stdlib"}, "data.validation_fraction": 0.01}
        changes |= {"train.max_steps": 20, "train.max_tokens": None, "train.warmup_steps": 2}
    nodes = validated(KINDS[flow], parameters, where=config).platform
    cost, machine = "The list price of its machines is not known.", nodes.machine_type
    if machine is not None and machine.price is not None:
        price = machine.price
        hour = f"{nodes.nodes} x {machine.name} cost ${nodes.nodes * price.usd:,.2f}"
        cost = f"An hour of {hour} at list price on demand (in {price.region}, {price.date})."
    return parameters | {
        "try_it": "First put your project, cluster, bucket and repository into "
        f"`deployments/configs/{config}`, and call `train-litgpt serve` again.\n\n"
        f"- On the command line: `train-litgpt run deployments/configs/{config}`\n"
        f"- To try it: `prefect deployment run '{flow}/{Path(config).stem}' -p 'overrides={json.dumps(changes)}'`\n"
        f"- {cost}"
    }
