"""The time that the pipeline adds to a bare torchrun of the same training, and that a run found done takes.

The dataset is there beforehand, and Prefect's database. Each round trains three times with the same new seed: by
torchrun alone on two nodes, by `train-litgpt run` against a server that is up, and with one that it starts. Then both
find everything done. At last a script's orchestrator is killed with its helpers, and the same command is timed to the
first line of the job that it has taken up.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from operator import sub
from pathlib import Path
from statistics import median
from typing import Any

from prefect.settings import get_current_settings
from prefect.testing.utilities import prefect_test_harness

from launcher.config import RunConfig, ScriptConfig, config_document, validated
from launcher.platforms import default_settings
from launcher.runs.attempts import job_handle
from launcher.runs.run import plan_run, plan_script, training_spec, write_config
from litgpt_demo.data.preparation import prepare
from litgpt_demo.node import agent, rendezvous
from litgpt_demo.training.checkpoints import list_complete

CONFIG = Path("deployments/configs/local.yaml")
ASKED = {"server up": (8.0, 3.0), "its own server": (14.0, 8.0)}  # DESIGN section 6: seconds added, and found done
CLI = [sys.executable, "-m", "cli"]
TICK = "import time\nfor number in range(6000):\n    print('tick', number, flush=True)\n    time.sleep(0.1)\n"


def bare(root: Path, settings: list[str]) -> float:
    """Seconds that torchrun alone takes for the training, node by node as a user would start it by hand."""
    run = plan_run(validated(RunConfig, config_document(CONFIG, [f"root={root}", *settings]), where="here"))
    write_config(run, training_spec(run, prepare(run.dataset, run.root)), attempt=1)
    job = run.job(attempt=1, image=None)
    environment = os.environ | default_settings().open().render(job).body["nodes"][0]["env"]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    began, nodes = time.monotonic(), []
    with root.with_suffix(".log").open("a") as log:  # an agent locks what it prints to, and anybody may lock /dev/null
        for rank in range(job.nodes):
            argv = job.node_command(node_rank=f"{rank}", master=f"127.0.0.1:{port}", directory=str(root), grace=1)
            command = agent.torchrun_command(rendezvous.parse(argv[3:], {}), log_dir=f"{root}-{time.time()}-{rank}")
            nodes.append(subprocess.Popen(command, env=environment, stdout=log))
    codes = [node.wait() for node in nodes]
    if any(codes) or list_complete(run.storage)[0].step != run.config.train.max_steps:
        raise SystemExit(f"the bare training failed:\n{root.with_suffix('.log').read_text()}")
    return time.monotonic() - began


def pipeline(verb: str, root: Path, settings: list[str], environment: Mapping[str, str]) -> float:
    """Seconds that `train-litgpt run` takes for the same training, from the command to its end."""
    command, began = [*CLI, verb, str(CONFIG), f"root={root}", *settings], time.monotonic()
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode or (verb == "run" and "✓ 5/5" not in done.stdout):
        raise SystemExit(f"the pipeline failed:\n{done.stdout}{done.stderr}")
    return time.monotonic() - began


def reattach(root: Path, number: int, environment: Mapping[str, str]) -> float:
    """Seconds from the command to the first line of a live job whose orchestrator was killed; there is one job."""
    script, config = root / "tick.py", root / f"tick-{number}.yaml"
    script.write_text(TICK)
    settings = {"name": f"tick-{number}-{os.getpid()}", "root": str(root / "ticks"), "script": str(script)}
    config.write_text(json.dumps(settings))  # JSON is YAML
    attempts = job_handle(plan_script(ScriptConfig(**settings))).attempts
    environment, shown = os.environ | environment, 0
    try:
        for _ in range(2):
            command, began = [*CLI, "run", str(config)], time.monotonic()
            with subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
            ) as orchestrator:
                shown += any("tick " in line for line in orchestrator.stdout)
                seconds = time.monotonic() - began
                os.killpg(orchestrator.pid, signal.SIGKILL)  # its server too; the job has a session of its own
        if shown < 2 or len(attempts.records()) != 1 or attempts.live() is None:
            raise SystemExit(f"{shown} of 2 commands reattached to the job")
        return seconds
    finally:
        attempts.cancel()


def measure(rounds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
    seen, bars = defaultdict[str, list[float]](list), {}
    with tempfile.TemporaryDirectory(prefix="bench-pipeline-") as folder, prefect_test_harness(600):
        root = Path(folder)
        up = {"PREFECT_API_URL": str(get_current_settings().api.url)}
        own = {"PREFECT_API_URL": "", "PREFECT_HOME": str(root / "own")}
        sides = [(kind, root / kind.replace(" ", "-"), side) for kind, side in zip(ASKED, (up, own), strict=True)]
        for _, place, side in sides:
            pipeline("prepare", place, [], side)
        for seed in range(1, rounds + 1):
            settings = [f"train.seed={seed}", "train.max_steps=20"]
            seen["bare torchrun"].append(bare(root / "bare", settings))
            for what in ("training", "found done"):
                for kind, place, side in sides:
                    seen[f"{what}, {kind}"].append(pipeline("run", place, settings, side))
            for kind, place, side in sides:
                seen[f"re-attach, {kind}"].append(reattach(place, seed, side))
    for kind, (added, found) in ASKED.items():
        seen[f"added, {kind}"] = [*map(sub, seen[f"training, {kind}"], seen["bare torchrun"])]
        bars[f"pipeline around the training, {kind}, s"] = median(seen[f"added, {kind}"]), "at most", added
        bars[f"a run found done, {kind}, s"] = median(seen[f"found done, {kind}"]), "at most", found
    bars["re-attach, s"] = median(seen["re-attach, server up"]), "at most", 10.0
    return bars, {"seconds": seen}
