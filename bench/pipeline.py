"""What the pipeline adds to a bare torchrun of the same training, with a Prefect server up and without one.

    make bench-pipeline

The dataset is there beforehand. Each round trains three times with the same new seed: by torchrun alone on two nodes,
by `train-litgpt run` against a server that is up, and by `train-litgpt run` with the ephemeral server. Figures, spread
and machine go to bench/results/pipeline-<machine>.json; the exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from urllib.error import URLError
from urllib.request import urlopen

from bench.figures import Bar, conclude
from launcher.config import RunConfig, load
from launcher.platforms.local.platform import LocalPlatform
from launcher.runs.run import plan_run, training_job, training_spec, write_config
from litgpt_demo.data.preparation import prepare
from litgpt_demo.node.torchrun import Rendezvous, torchrun_command
from litgpt_demo.training.checkpoints import committed

CONFIG = Path("deployments/configs/local.yaml")
# DESIGN section 6: seconds that the pipeline may add.
BARS = {"pipeline around the training, server up": 10.0, "pipeline around the training, ephemeral server": 25.0}


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where the measurement works, and for how long each training lasts."""

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


def pipeline(bench: Bench, seed: int, *, name: str, environment: dict[str, str]) -> float:
    """Seconds that `train-litgpt run` takes for the same training, from the command to its end."""
    config = bench.config(seed, name)
    settings = [f"root={config.root}", f"train.seed={seed}", f"train.max_steps={bench.steps}"]
    command = [sys.executable, "-m", "cli.main", "run", str(CONFIG), *settings]
    began = time.monotonic()
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    seconds = time.monotonic() - began
    if done.returncode or "✓ 5/5" not in done.stdout:
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


def measure(bench: Bench, rounds: int) -> dict[str, list[float]]:
    """Seconds of every training, by kind, the kinds in turn."""
    seconds: dict[str, list[float]] = {"bare torchrun": [], **{bar: [] for bar in BARS}}
    up, alone = BARS
    with prefect_server(bench.root / "prefect-up") as address:
        ephemeral = {"PREFECT_HOME": str(bench.root / "prefect-alone"), "PREFECT_API_URL": ""}
        for root in ("up", "alone"):
            run = plan_run(bench.config(0, root))
            prepare(run.dataset, run.root)
        for seed in range(1, rounds + 1):
            seconds["bare torchrun"].append(bare(bench, seed))
            seconds[up].append(pipeline(bench, seed, name="up", environment={"PREFECT_API_URL": address}))
            seconds[alone].append(pipeline(bench, seed, name="alone", environment=ephemeral))
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each training")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-pipeline-") as folder:
        seconds = measure(Bench(root=Path(folder), steps=args.steps), args.rounds)
    added = {
        bar: [with_us - without for with_us, without in zip(seconds[bar], seconds["bare torchrun"], strict=True)]
        for bar in BARS
    }
    bars = [
        Bar(f"{name}, s", middle := median(added[name]), f"at most {asked:.0f}", middle <= asked)
        for name, asked in BARS.items()
    ]
    return conclude("pipeline", bars, {"steps": args.steps, "seconds": seconds, "added_seconds": added})


if __name__ == "__main__":
    sys.exit(main())
