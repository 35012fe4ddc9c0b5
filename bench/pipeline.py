"""The time that the pipeline adds to a bare torchrun of the same training, and that a run found done takes.

    make bench-pipeline            with QUICK=1 one round, within 4 minutes

The dataset is there beforehand, and Prefect's database, which the first command with a new PREFECT_HOME makes once (8 s
of a core). Each round trains three times with the same new seed: by torchrun alone on two nodes, by `train-litgpt run`
against a server that is up, and by `train-litgpt run` with the server that it starts itself. Then both commands run
again, and find everything done. At last the orchestrator of a script is killed (SIGKILL, with its helpers), and the
same command is timed from its start to the first line of the job that it has taken up.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from urllib.request import urlopen

import psutil

from bench.common import arguments, at_most, conclude
from launcher.config import RunConfig, ScriptConfig, load
from launcher.platforms.local.platform import LocalPlatform
from launcher.runs.attempts import claim_of
from launcher.runs.run import plan_run, training_spec, write_config
from litgpt_demo.data.preparation import prepare
from litgpt_demo.node.torchrun import Rendezvous, torchrun_command
from litgpt_demo.training.checkpoints import committed

CONFIG = Path("deployments/configs/local.yaml")
# DESIGN section 6, in seconds: what the pipeline may add to the bare training, and what a run found done may take.
ADDED = {"server up": 8.0, "its own server": 20.0}
FOUND = {"server up": 5.0, "its own server": 12.0}
REATTACH = 10.0
TICK = "import time\nfor number in range(6000):\n    print('tick', number, flush=True)\n    time.sleep(0.1)\n"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def bare(root: Path, seed: int, steps: int) -> float:
    """Seconds that torchrun alone takes for the training, node by node as a user would start it by hand."""
    run = plan_run(load(RunConfig, CONFIG, settings_of(root / "bare", seed, steps)))
    write_config(run, training_spec(run, prepare(run.dataset, run.root)))
    job = run.job(attempt=1, image=None)
    submission = LocalPlatform().render(job)
    port, logs, environment = free_port(), root / f"logs-{seed}", submission.body["nodes"][0]["env"]
    began = time.monotonic()
    with (root / "bare.log").open("a") as log:
        nodes = [
            subprocess.Popen(
                torchrun_command(
                    Rendezvous(nodes=job.nodes, node_rank=rank, host="127.0.0.1", port=port, run_id="bare"),
                    processes=job.processes,
                    program=job.program,
                    log_dir=f"{logs}-{rank}",
                ),
                env=os.environ | environment,
                stdout=log,  # an agent locks what it prints to, and somebody may hold a lock on /dev/null for good
            )
            for rank in range(job.nodes)
        ]
    codes = [node.wait() for node in nodes]
    if any(codes) or committed(run.storage)[0].step != steps:
        raise SystemExit(f"the bare training of seed {seed} failed; its logs are under {root}")
    return time.monotonic() - began


def settings_of(root: Path, seed: int, steps: int) -> list[str]:
    return [f"root={root}", f"train.seed={seed}", f"train.max_steps={steps}"]


def pipeline(root: Path, seed: int, steps: int, environment: Mapping[str, str], *, verb: str = "run") -> float:
    """Seconds that `train-litgpt run` takes for the same training, from the command to its end."""
    command = [sys.executable, "-m", "cli.main", verb, str(CONFIG), *settings_of(root, seed, steps)]
    began = time.monotonic()
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    seconds = time.monotonic() - began
    if done.returncode or (verb == "run" and "✓ 5/5" not in done.stdout):
        raise SystemExit(f"the pipeline failed:\n{done.stdout}{done.stderr}")
    return seconds


@contextmanager
def prefect_server(home: Path) -> Iterator[str]:
    """A Prefect server of its own; yields the address of its API."""
    port = free_port()
    command = [sys.executable, "-m", "prefect", "server", "start", "--port", str(port), "--no-ui"]
    environment = os.environ | {"PREFECT_HOME": str(home), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}/api"
    try:
        while server.poll() is None:
            with suppress(OSError), urlopen(f"{address}/health", timeout=2):
                break
            time.sleep(0.5)
        else:
            raise SystemExit("Prefect's server did not start")
        yield address
    finally:
        server.terminate()
        server.wait()


def reattach(root: Path, number: int, environment: Mapping[str, str]) -> float:
    """Seconds from the command to the first line of a live job whose orchestrator was killed; there is one job."""
    script = root / "tick.py"
    script.write_text(TICK)
    settings = {"name": f"tick-{number}-{os.getpid()}", "root": str(root / "ticks"), "script": str(script)}
    path = root / f"tick-{number}.yaml"
    path.write_text(json.dumps(settings))  # JSON is YAML
    attempts = claim_of(ScriptConfig.model_validate(settings)).attempts

    def seconds_to_a_line() -> float:
        command = [sys.executable, "-m", "cli.main", "run", str(path)]
        began = time.monotonic()
        with subprocess.Popen(
            command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as orchestrator:
            assert orchestrator.stdout is not None
            shown = any("tick " in line for line in orchestrator.stdout)
            seconds = time.monotonic() - began
            for child in psutil.Process(orchestrator.pid).children(recursive=True):
                child.kill()
            orchestrator.kill()
        if not shown:
            raise SystemExit("the job's lines were not shown")
        return seconds

    try:
        seconds_to_a_line()
        seconds = seconds_to_a_line()
        if len(attempts.records()) != 1 or attempts.live() is None:
            raise SystemExit("the job was not taken up")
    finally:
        attempts.cancel()
    return seconds


def main() -> int:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each training")
    args = parser.parse_args()
    alone: list[float] = []
    runs: dict[str, dict[str, list[float]]] = {
        what: {kind: [] for kind in ADDED} for what in ("training", "found done", "re-attach")
    }
    with tempfile.TemporaryDirectory(prefix="bench-pipeline-") as folder, prefect_server(Path(folder, "up")) as address:
        root = Path(folder)
        sides = {
            "server up": {"PREFECT_API_URL": address},
            "its own server": {"PREFECT_HOME": str(root / "own"), "PREFECT_API_URL": ""},
        }
        for kind, environment in sides.items():
            pipeline(root / kind.replace(" ", "-"), 0, args.steps, environment, verb="prepare")
        for seed in range(1, args.rounds + 1):
            alone.append(bare(root, seed, args.steps))
            for what in ("training", "found done"):
                for kind, environment in sides.items():
                    runs[what][kind].append(pipeline(root / kind.replace(" ", "-"), seed, args.steps, environment))
            for kind, environment in sides.items():
                runs["re-attach"][kind].append(reattach(root, seed, environment))
    added = {
        kind: [with_us - without for with_us, without in zip(seconds, alone, strict=True)]
        for kind, seconds in runs["training"].items()
    }
    bars = [
        *(
            at_most(f"pipeline around the training, {kind}, s", median(added[kind]), most)
            for kind, most in ADDED.items()
        ),
        *(
            at_most(f"a run found done, {kind}, s", median(runs["found done"][kind]), most)
            for kind, most in FOUND.items()
        ),
        at_most("re-attach, s", median(runs["re-attach"]["server up"]), REATTACH),
    ]
    seconds = {"bare torchrun": alone, **runs}
    seen = {"steps": args.steps, "load": os.getloadavg(), "seconds": seconds, "added_seconds": added}
    return conclude("pipeline", bars, seen)


if __name__ == "__main__":
    sys.exit(main())
