"""The time that the pipeline adds to a bare torchrun of the same training, and that a run found done takes.

    make bench-pipeline            with QUICK=1 one round, within 4 minutes

The dataset is there beforehand, and Prefect's database, which the first command with a new PREFECT_HOME makes once (8 s
of a core). Each round trains three times with the same new seed: by torchrun alone on two nodes, by `train-litgpt run`
against a server that is up, and by `train-litgpt run` with the server that it starts itself. Then both commands run
again, and find everything done. At last the orchestrator of a script is killed (SIGKILL, with its helpers), and the
same command is timed from its start to the first line of the job that it has taken up. Figures, spread and machine
go to bench/results/pipeline-<machine>.json; the exit code is 1 if a bar is missed.
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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeAlias
from urllib.error import URLError
from urllib.request import urlopen

import psutil

from bench.figures import Bar, arguments, conclude
from launcher.config import RunConfig, ScriptConfig, load
from launcher.platforms.local.platform import LocalPlatform
from launcher.runs.attempts import claim_of
from launcher.runs.run import plan_run, training_job, training_spec, write_config
from litgpt_demo.data.preparation import prepare
from litgpt_demo.node.torchrun import Rendezvous, torchrun_command
from litgpt_demo.training.checkpoints import committed

CONFIG = Path("deployments/configs/local.yaml")
# DESIGN section 6, in seconds: what the pipeline may add to the bare training, and what a run found done may take.
ADDED = {"server up": 8.0, "its own server": 20.0}
FOUND = {"server up": 5.0, "its own server": 12.0}
REATTACH = 10.0
TICK = "import time\nfor number in range(6000):\n    print('tick', number, flush=True)\n    time.sleep(0.1)\n"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The place of the measurement, and the length of each training."""

    root: Path
    steps: int

    def config(self, seed: int, root: str) -> RunConfig:
        settings = [f"root={self.root / root}", f"train.seed={seed}", f"train.max_steps={self.steps}"]
        return load(RunConfig, CONFIG, settings)


def bare(bench: Bench, seed: int) -> float:
    """Seconds that torchrun alone takes for the training, node by node as a user would start it by hand."""
    config = bench.config(seed, "bare")
    run = plan_run(config)
    write_config(run, training_spec(run, prepare(run.dataset, run.root)))
    job = training_job(run, attempt=1, image=None)
    submission = LocalPlatform().render(job)
    environment = os.environ | submission.body["nodes"][0]["env"]
    began = time.monotonic()
    nodes = [
        subprocess.Popen(
            torchrun_command(
                Rendezvous(
                    nodes=job.nodes, node_rank=rank, host="127.0.0.1", port=submission.body["port"], run_id="bare"
                ),
                processes=job.processes,
                program=job.program,
                log_dir=str(bench.root / f"logs-{seed}-{rank}"),
            ),
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        for rank in range(job.nodes)
    ]
    codes = [node.wait() for node in nodes]
    if any(codes) or committed(run.storage)[0].step != bench.steps:
        raise SystemExit(f"the bare training of seed {seed} failed; its logs are under {bench.root}")
    return time.monotonic() - began


def pipeline(bench: Bench, seed: int, *, name: str, environment: Mapping[str, str], verb: str = "run") -> float:
    """Seconds that `train-litgpt run` takes for the same training, from the command to its end."""
    config = bench.config(seed, name)
    settings = [f"root={config.root}", f"train.seed={seed}", f"train.max_steps={bench.steps}"]
    command = [sys.executable, "-m", "cli.main", verb, str(CONFIG), *settings]
    began = time.monotonic()
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    seconds = time.monotonic() - began
    if done.returncode or (verb == "run" and "✓ 5/5" not in done.stdout):
        raise SystemExit(f"the pipeline failed:\n{done.stdout}{done.stderr}")
    return seconds


@contextmanager
def prefect_server(home: Path) -> Iterator[str]:
    """A Prefect server of its own; yields the address of its API."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "prefect", "server", "start", "--port", str(port), "--no-ui"]
    environment = os.environ | {"PREFECT_HOME": str(home), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}/api"
    try:
        while not healthy(address):
            if server.poll() is not None:
                raise SystemExit("Prefect's server did not start")
            time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        server.wait()


def healthy(address: str) -> bool:
    try:
        with urlopen(f"{address}/health", timeout=2):
            return True
    except (URLError, OSError):
        return False


def reattach(bench: Bench, number: int, environment: Mapping[str, str]) -> float:
    """Seconds from the command to the first line of a live job whose orchestrator was killed; there is one job."""
    script = bench.root / "tick.py"
    script.write_text(TICK)
    settings = {"name": f"tick-{number}-{os.getpid()}", "root": str(bench.root / "ticks"), "script": str(script)}
    path = bench.root / f"tick-{number}.yaml"
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


Seconds: TypeAlias = dict[str, list[float]]


def measure(bench: Bench, rounds: int) -> tuple[Seconds, dict[str, Seconds]]:
    """Seconds of every bare training, and of every first and second run of the pipeline by its kind of server."""
    bare_seconds: Seconds = {"bare torchrun": []}
    runs: dict[str, Seconds] = {"training": {kind: [] for kind in ADDED}, "found done": {kind: [] for kind in FOUND}}
    taken_up: Seconds = {kind: [] for kind in ADDED}
    with prefect_server(bench.root / "prefect-up") as address:
        sides = {
            "server up": {"PREFECT_API_URL": address},
            "its own server": {"PREFECT_HOME": str(bench.root / "prefect-own"), "PREFECT_API_URL": ""},
        }
        for kind, environment in sides.items():
            pipeline(bench, 0, name=kind.replace(" ", "-"), environment=environment, verb="prepare")
        for seed in range(1, rounds + 1):
            bare_seconds["bare torchrun"].append(bare(bench, seed))
            for seconds in runs.values():
                for kind, environment in sides.items():
                    name = kind.replace(" ", "-")
                    seconds[kind].append(pipeline(bench, seed, name=name, environment=environment))
            for kind, environment in sides.items():
                taken_up[kind].append(reattach(bench, seed, environment))
    return bare_seconds, runs | {"re-attach": taken_up}


def main() -> int:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each training")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-pipeline-") as folder:
        alone, runs = measure(Bench(root=Path(folder), steps=args.steps), args.rounds)
    added = {
        kind: [with_us - without for with_us, without in zip(seconds, alone["bare torchrun"], strict=True)]
        for kind, seconds in runs["training"].items()
    }
    bars = [
        Bar(f"{what}, {kind}, s", middle := median(seconds[kind]), f"at most {most:.0f}", middle <= most)
        for what, asked, seconds in (
            ("pipeline around the training", ADDED, added),
            ("a run found done", FOUND, runs["found done"]),
        )
        for kind, most in asked.items()
    ]
    middle = median(runs["re-attach"]["server up"])
    bars.append(Bar("re-attach, s", middle, f"at most {REATTACH:.0f}", middle <= REATTACH))
    seen = {"steps": args.steps, "load": os.getloadavg(), "seconds": alone | runs, "added_seconds": added}
    return conclude("pipeline", bars, seen)


if __name__ == "__main__":
    sys.exit(main())
