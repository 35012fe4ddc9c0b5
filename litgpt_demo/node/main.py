"""One node of a job: learn rank and peers, check the machine, prove the network, stage the data in, run torchrun, say
how it ended.

    python -m litgpt_demo node --nodes 2 --node-rank 0 --processes 8 --master 10.0.0.5:29500 --run-id owt-1a2b-1 \\
        --directory /runs/owt-1a2b/attempts/1 -- train.py --steps 100

Any script or module can stand behind the `--`. The exit code is that of the fault's class (litgpt_demo.errors), which
torchrun's never is; what happened is left in `<directory>/node-<rank>.json`.
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
from litgpt_demo.node.network_test import MEASURED, PLACE, RESULT, fabric_location, rank_order, run_network_test
from litgpt_demo.node.rendezvous import Node, await_name, contradictions, machine_name, parse, unpack
from litgpt_demo.secrets import Cleaner
from litgpt_demo.storage.local import atomic_write_json, preallocate

# What torchrun gives to each of its ranks. Of a platform's own, RANK and WORLD_SIZE count nodes and not processes.
_OF_RANKS = frozenset(
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT")
)


def exports(node: Node, environ: Mapping[str, str], *, cores: int) -> dict[str, str]:
    """The environment of torchrun and its ranks: ours, and what they need to know."""
    # torchrun reads a `PET_<FLAG>` for every flag that it is not given.
    mine = {name: environ[name] for name in environ if not name.startswith("PET_") and name not in _OF_RANKS}
    mine.setdefault("OMP_NUM_THREADS", str(max(1, cores // max(1, node.processes))))
    mine[NODE_DIRECTORY] = str(node.own)
    mine[GRACE] = mine[torchrun.SHUTDOWN_TIMEOUT] = str(node.grace)
    # torchrun's tail of its ranks' output must not be held back, and says which rank of the whole job it is.
    mine["PYTHONUNBUFFERED"] = "1"
    if node.is_ours:  # torchrun starts it as it starts users' modules, which may lie here
        mine["PYTHONSAFEPATH"] = "1"
    # What each rank had begun when a collective timed out; torch 2.5 and older know the second name alone.
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        mine[name] = str(node.own / RECORDER)
    mine["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "[${role_name}${rank}]:"
    return mine


def report(
    node: Node, fault: FailureClass | None, message: str, result: TorchrunResult, *, place: int
) -> dict[str, Any]:
    """Return the content of `node-<rank>.json`; of its ranks, the one that explains the others comes first."""
    first, cause = place * node.processes, root_cause(result.failures)
    return {
        "node": node.node_rank,
        "host": machine_name(),
        "exit_code": 0 if fault is None else fault.exit_code,
        "fault": fault,
        "message": message,
        "asked": result.asked,
        "nodes": node.nodes,
        "processes": node.processes,
        "ranks": [
            {"rank": first + one.local_rank, **asdict(one), "fault": one.fault, "secondary": one.secondary}
            for one in sorted(result.failures, key=lambda one: one is not cause)
        ],
        "stopped": [first + local for local in result.stopped],
        "traces": [asdict(one) for one in result.traces],
    }


def run(node: Node, times: NodeTimer, path: Path) -> dict[str, Any]:
    """Everything from the checks to the report, which will lie at `path`."""
    shutdown, stack, code, place = ShutdownState(), contextlib.ExitStack(), node.own / "code", node.node_rank
    with contextlib.suppress(OSError):  # whether the directory can be written is one of the checks
        preallocate(path)
    forward_signals(shutdown, grace=node.grace)
    try:
        found = [*check_call(node), *contradictions(node, os.environ)]
        ranks: dict[str, str] = {}
        if not any(finding.severity == "error" for finding in found):
            found += pin_cpus(node.network.cpus)
            ranks, unset = exports(node, os.environ, cores=usable_cores()), []
            try:
                ranks = of_network(node.network, ranks)
            except TrainLitgptError as error:
                unset.append(Finding.of(error, "network.environment"))
            ranks = with_libcuda(ranks)
            # A script of the network may have failed because of what is wrong with the machine: that comes first.
            found += [*check_machine(node, ranks), *unset]
        for finding in found:
            print(finding, flush=True)
        if errors := [finding for finding in found if finding.severity == "error"]:
            return report(node, errors[0].fault, str(errors[0]), TorchrunResult(), place=place)
        await_name(node.host)
        if node.code is not None:
            stack.enter_context(unpacked_code(node.code, code))
            if not (script := node.program[0]).startswith("-") and not (code / script).is_file():
                raise UserError(f"the program {script} is no file of the mounted code", fix="give its path in there")
        ranks = with_compile_cache(ranks)
        ranks[PLACE] = fabric_location(node.network.place, ranks)
        with times.spent_on("gate"):
            result = run_network_test(node, ranks, shutdown)
        if result is not None:
            ranks[MEASURED] = str(node.own / RESULT)
            place = rank_order(result.places)[place]
        if node.stage:
            from litgpt_demo.data.dataset import stage

            with times.spent_on("stage"):
                first, *_ = [stage(address, node.own / "data") for address in node.stage]
            ranks["LITGPT_DATASET"] = str(first)
        if node.code is not None:  # the gate's ranks are ours
            ranks[CODE] = str(code)
        ranks[TIMES] = json.dumps(asdict(times))
        ending = run_ranks(node, ranks, shutdown, place=place)
    except Exception as error:
        # A signal can fall between torchrun's start and our hold on it.
        kill_by_env_marker(NODE_DIRECTORY, str(node.own), grace=0)
        if not isinstance(error, TrainLitgptError):
            traceback.print_exc()
        words = f"{type(error).__name__}: {error}"
        return report(node, fault_of_exception(error), words, TorchrunResult(), place=node.node_rank)
    finally:
        stack.close()
    return report(node, fault_of(ending), ending.cause, ending, place=place)


def main(argv: Sequence[str]) -> int:
    """`python -m litgpt_demo node`: the exit code is 0 or that of the fault's class."""
    from litgpt_demo.storage import open_storage

    times = NodeTimer()
    node = parse(unpack(argv, os.environ), os.environ)
    attempt = (node.log_uri or str(node.directory)).rstrip("/").rpartition("/")[2]  # its folder is called by its number
    times.attempt = int(attempt) if attempt.isdecimal() and len(attempt) < 10 else 0
    number, path = node.node_rank, node.own.with_suffix(".json")
    with contextlib.ExitStack() as stack:
        if node.log_uri is not None and open_storage(node.log_uri).address() != str(node.directory.resolve()):
            restart = os.environ.get("LITGPT_RESTART", "")
            life = int(restart) if restart.isdecimal() else 0
            stack.enter_context(uploaded(node.directory, node.log_uri, number, life=life, interval=node.log_every))
            stack.enter_context(tee(path.with_suffix(".log")))
        outcome = run(node, times, path)
        outcome = Cleaner()(outcome)  # a rank may have raised an error with a secret in its text
        outcome |= {"started": times.started, "ended": times.started + times.elapsed(), **times.phases()}
        with contextlib.suppress(OSError):  # the findings already said that the directory cannot be written
            atomic_write_json(path, outcome)
        if outcome["fault"]:
            code, fault = outcome["exit_code"], outcome["fault"]
            print(f"node {number} ends with {code} ({fault}): {outcome['message']}", flush=True)
    shutil.rmtree(node.own / "data", ignore_errors=True)
    return int(outcome["exit_code"])
