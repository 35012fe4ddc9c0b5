"""One node of a job: it checks the machine, tests the network, stages the data, runs torchrun and reports the end.

    python -m litgpt_demo node --nodes 2 --node-rank 0 --processes 8 --master 10.0.0.5:29500 --run-id owt-1a2b-1 \\
        --directory /runs/owt-1a2b/attempts/1 -- train.py --steps 100

Any script or module can follow the `--`. The exit code is that of the failure's class (litgpt_demo.errors). The report
is `<directory>/node-<rank>.json`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from litgpt_demo.errors import FailureClass, Finding, TrainLitgptError, UserError, fault_of_exception, root_cause
from litgpt_demo.heartbeat import NODE_DIRECTORY
from litgpt_demo.node import torchrun
from litgpt_demo.node.agent import (
    ShutdownState,
    TorchrunResult,
    fault_of,
    forward_signals,
    kill_by_env_marker,
    run_ranks,
)
from litgpt_demo.node.checks import check_call, check_machine, pin_cpus, usable_cores
from litgpt_demo.node.code import CODE, unpacked_code
from litgpt_demo.node.environment import GRACE, TIMES, NodeTimer, of_network, with_compile_cache, with_libcuda
from litgpt_demo.node.evidence import RECORDER
from litgpt_demo.node.logs import tee, uploaded
from litgpt_demo.node.network_test import LOCATION, MEASUREMENT, RESULT, fabric_location, rank_order, run_network_test
from litgpt_demo.node.rendezvous import Node, await_name, contradictions, machine_name, parse, unpack
from litgpt_demo.secrets import Cleaner
from litgpt_demo.storage.local import atomic_write_json, preallocate

# Variables that torchrun sets for each rank. A platform's RANK and WORLD_SIZE may count nodes instead of processes.
_OF_RANKS = frozenset(
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT")
)


def exports(node: Node, environ: Mapping[str, str], *, cores: int) -> dict[str, str]:
    """Return the environment of torchrun and its ranks: the node's, and what they need to know."""
    # torchrun reads a `PET_<FLAG>` for every flag that it is not given.
    variables = {name: environ[name] for name in environ if not name.startswith("PET_") and name not in _OF_RANKS}
    variables.setdefault("OMP_NUM_THREADS", str(max(1, cores // max(1, node.processes))))
    variables[NODE_DIRECTORY] = str(node.own)
    variables[GRACE] = variables[torchrun.SHUTDOWN_TIMEOUT] = str(node.grace)
    # torchrun prints its ranks' output at once, with the number of the rank in the job.
    variables["PYTHONUNBUFFERED"] = "1"
    variables["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "[${role_name}${rank}]:"
    if node.is_ours:  # our own code is installed; only users' modules may be in the folder that torchrun starts in
        variables["PYTHONSAFEPATH"] = "1"
        # Blocks of a GPU's memory that grow, instead of new ones next to holes. torch reads the old name too.
        if "PYTORCH_CUDA_ALLOC_CONF" not in variables:
            variables.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # The collectives that each rank had begun when one timed out. torch 2.5 and older read only the second name.
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        variables[name] = str(node.own / RECORDER)
    return variables


def report(
    node: Node, fault: FailureClass | None, message: str, result: TorchrunResult, *, place: int
) -> dict[str, Any]:
    """Return the content of `node-<rank>.json`. The root cause comes first among its ranks."""
    first_rank, cause = place * node.processes, root_cause(result.failures)
    return {
        "node": node.node_rank,
        "host": machine_name(),
        "exit_code": 0 if fault is None else fault.exit_code,
        "fault": fault,
        "message": message,
        "signalled_at": result.signalled_at,
        "nodes": node.nodes,
        "processes": node.processes,
        "ranks": [
            {"rank": first_rank + rank.local_rank, **asdict(rank), "fault": rank.fault, "secondary": rank.secondary}
            for rank in sorted(result.failures, key=lambda rank: rank is not cause)
        ],
        "stopped": [first_rank + local_rank for local_rank in result.stopped],
        "traces": [asdict(trace) for trace in result.traces],
    }


def run(node: Node, timer: NodeTimer, path: Path) -> dict[str, Any]:
    """Do everything from the checks to the report, which will be stored at `path`; return the report."""
    shutdown, stack = ShutdownState(), contextlib.ExitStack()
    place = node.node_rank
    with contextlib.suppress(OSError):  # whether the directory can be written is one of the checks
        preallocate(path)
    forward_signals(shutdown, grace=node.grace)
    try:
        findings, environ = _check(node)
        for finding in findings:
            print(finding, flush=True)
        errors = [finding for finding in findings if finding.severity == "error"]
        if errors:
            return report(node, errors[0].fault, str(errors[0]), TorchrunResult(), place=place)
        await_name(node.host)
        code = node.own / "code"
        if node.code is not None:
            stack.enter_context(unpacked_code(node.code, code))
            script = node.program[0]
            if not script.startswith("-") and not (code / script).is_file():
                what = f"the program {script} is not a file of the mounted code"
                raise UserError(what, fix="give its path within the mounted folder")
        environ = with_compile_cache(environ)
        environ[LOCATION] = fabric_location(node.network.location_source, environ)
        with timer.spent_on("network_test"):
            network_test = run_network_test(node, environ, shutdown)
        if network_test is not None:
            environ[MEASUREMENT] = str(node.own / RESULT)
            place = rank_order(network_test.locations)[place]
        if node.stage:
            from litgpt_demo.data.dataset import stage

            with timer.spent_on("stage"):
                datasets = [stage(address, node.own / "data") for address in node.stage]
            environ["LITGPT_DATASET"] = str(datasets[0])
        if node.code is not None:  # the ranks of the network test run only our own code
            environ[CODE] = str(code)
        environ[TIMES] = json.dumps(asdict(timer))
        result = run_ranks(node, environ, shutdown, place=place)
    except Exception as error:
        # A signal can arrive after torchrun's start, before its process is in `shutdown`.
        kill_by_env_marker(NODE_DIRECTORY, str(node.own), grace=0)
        if not isinstance(error, TrainLitgptError):
            traceback.print_exc()
        message = f"{type(error).__name__}: {error}"
        return report(node, fault_of_exception(error), message, TorchrunResult(), place=node.node_rank)
    finally:
        stack.close()
    return report(node, fault_of(result), result.cause, result, place=place)


def _check(node: Node) -> tuple[list[Finding], dict[str, str]]:
    """Return the findings of all checks, and the environment of the ranks, which is empty after an early error."""
    findings = [*check_call(node), *contradictions(node, os.environ)]
    if any(finding.severity == "error" for finding in findings):
        return findings, {}
    findings += pin_cpus(node.network.cpus)
    environ = exports(node, os.environ, cores=usable_cores())
    failed_scripts: list[Finding] = []
    try:
        environ = of_network(node.network, environ)
    except TrainLitgptError as error:
        failed_scripts.append(Finding.of(error, "network.environment"))
    environ = with_libcuda(environ)
    # A script of the network may have failed because of a fault of the machine, which comes first.
    findings += [*check_machine(node, environ), *failed_scripts]
    return findings, environ


def main(argv: Sequence[str]) -> int:
    """Run `python -m litgpt_demo node`; the exit code is 0 or that of the failure's class."""
    from litgpt_demo.storage import open_storage

    timer = NodeTimer()
    node = parse(unpack(argv, os.environ), os.environ)
    folder = (node.log_uri or str(node.directory)).rstrip("/").rpartition("/")[2]  # attempts/<number>
    if folder.isdecimal() and len(folder) < 10:
        timer.attempt = int(folder)
    number, path = node.node_rank, node.own.with_suffix(".json")
    with contextlib.ExitStack() as stack:
        if node.log_uri is not None and open_storage(node.log_uri).address() != str(node.directory.resolve()):
            restart = os.environ.get("LITGPT_RESTART", "")
            count = int(restart) if restart.isdecimal() else 0
            upload = uploaded(node.directory, node.log_uri, number, restart_count=count, interval=node.log_every)
            stack.enter_context(upload)
            stack.enter_context(tee(path.with_suffix(".log")))
        document = Cleaner()(run(node, timer, path))  # a rank may have raised an error with a secret in its text
        document |= {"started": timer.started_at, "ended": timer.started_at + timer.elapsed(), **timer.phases()}
        with contextlib.suppress(OSError):  # a finding already says that the directory cannot be written
            atomic_write_json(path, document)
        if document["fault"]:
            code, fault = document["exit_code"], document["fault"]
            print(f"node {number} ends with {code} ({fault}): {document['message']}", flush=True)
    shutil.rmtree(node.own / "data", ignore_errors=True)
    return int(document["exit_code"])
