"""One node of a job: learn rank and peers, check the machine, prove the network, stage the data in, run torchrun, say
how it ended.

    python -m litgpt_demo node --nodes 2 --node-rank 0 --processes 8 --master 10.0.0.5:29500 --run-id owt-1a2b-1 \\
        --directory /runs/owt-1a2b/attempts/1 -- train.py --steps 100

Any script or module can stand behind the `--`. The exit code is that of the fault's class (litgpt_demo.errors), which
torchrun's never is; what happened is left in `<directory>/node-<rank>.json`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from litgpt_demo.errors import Fault, TrainLitgptError, UserError, decisive, fault_of_exception
from litgpt_demo.findings import Finding
from litgpt_demo.heartbeat import NODE_DIRECTORY
from litgpt_demo.node.agent import Ending, Leave, fault_of, kill_tagged, pass_signals_on, run_ranks
from litgpt_demo.node.checks import check_call, check_machine, keep_to, usable_cores
from litgpt_demo.node.code import CODE, UnpackedCode, fetch_code
from litgpt_demo.node.collectives import MEASURED, PLACE, RESULT
from litgpt_demo.node.environment import GRACE, of_network, with_compile_cache, with_libcuda
from litgpt_demo.node.evidence import recorder_prefix
from litgpt_demo.node.gate import measured, place_of, ranks_by_place
from litgpt_demo.node.log_upload import LogUploader, tee
from litgpt_demo.node.rendezvous import Node, await_name, contradictions, machine_name, parse, unpack, without_leftovers
from litgpt_demo.node.times import TIMES, NodeTimes
from litgpt_demo.storage.local import reserve, write_whole


def exports(node: Node, environ: Mapping[str, str], *, cores: int) -> dict[str, str]:
    """The environment of torchrun and its ranks: ours, and what they need to know."""
    mine = without_leftovers(environ)
    mine.setdefault("OMP_NUM_THREADS", str(max(1, cores // max(1, node.processes))))
    mine[NODE_DIRECTORY] = str(node.own)
    mine[GRACE] = str(node.grace)
    # torchrun's tail of its ranks' output must not be held back, and says which rank of the whole job it is.
    mine["PYTHONUNBUFFERED"] = "1"
    if node.program[:2] == ("-m", "litgpt_demo"):  # torchrun starts it as it starts users' modules, which may lie here
        mine["PYTHONSAFEPATH"] = "1"
    # What each rank had begun when a collective timed out; torch 2.5 and older know the second name alone.
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        mine[name] = str(recorder_prefix(node.own))
    mine["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "[${role_name}${rank}]:"
    return mine


def report(
    node: Node, fault: Fault | None, message: str, ending: Ending, *, place: int | None = None
) -> dict[str, Any]:
    """Return the content of `node-<rank>.json`; of its ranks, the one that explains the others comes first.

    Where they were not started, their ending is the default one; `place` is as in `run_ranks`.
    """
    first = (node.meet.node_rank if place is None else place) * node.processes
    cause = decisive(ending.failures)
    return {
        "node": node.meet.node_rank,
        "host": machine_name(),
        "exit_code": 0 if fault is None else fault.exit_code,
        "fault": fault,
        "message": message,
        "asked": ending.asked,
        "ended": time.time(),
        "nodes": node.meet.nodes,
        "processes": node.processes,
        "ranks": [
            {"rank": first + one.local_rank, **asdict(one), "fault": one.fault, "bystander": one.bystander}
            for one in sorted(ending.failures, key=lambda one: one is not cause)
        ],
        "stopped": [first + local for local in ending.stopped],
        "traces": [asdict(one) for one in ending.traces],
    }


def prepared(node: Node, environ: Mapping[str, str]) -> tuple[dict[str, str], list[Finding]]:
    """Return the ranks' environment, and what is wrong with this call and this machine."""
    found = [*check_call(node), *contradictions(node, environ)]
    if any(finding.severity == "error" for finding in found):
        return {}, found
    bound = keep_to(node.network.cpus)
    ranks, unset = exports(node, environ, cores=usable_cores()), []
    try:
        ranks = of_network(node.network, ranks)
    except TrainLitgptError as error:
        unset.append(Finding.of(error, "network.environment"))
    ranks = with_libcuda(ranks)
    # A script of the network may have failed because of what is wrong with the machine: that comes first.
    return ranks, [*found, *([bound] if bound else []), *check_machine(node, ranks), *unset]


def run(node: Node, times: NodeTimes, path: Path) -> dict[str, Any]:
    """Everything from the checks to the report, which will lie at `path`."""
    leave = Leave()
    code: UnpackedCode | None = None
    with contextlib.suppress(OSError):  # whether the directory can be written is one of the checks
        reserve(path)
    pass_signals_on(leave, grace=node.grace)
    try:
        ranks, found = prepared(node, os.environ)
        for finding in found:
            print(finding, flush=True)
        if errors := [finding for finding in found if finding.severity == "error"]:
            return report(node, errors[0].fault, str(errors[0]), Ending())
        await_name(node.meet.host)
        if node.code is not None:
            code = fetch_code(node.code, node.own / "code")
            if not (script := node.program[0]).startswith("-") and not (code.folder / script).is_file():
                raise UserError(f"the program {script} is no file of the mounted code; give its path in there")
        ranks = with_compile_cache(ranks)
        ranks[PLACE] = place_of(node.network.place, ranks)
        place = node.meet.node_rank
        with times.spent_on("gate"):
            result = measured(node, ranks, leave)
        if result is not None:
            ranks[MEASURED] = str(node.own / RESULT)
            place = ranks_by_place(result.places)[place]
        if node.stage:
            from litgpt_demo.data.dataset import stage

            with times.spent_on("stage"):
                first, *_ = [stage(address, node.own / "data") for address in node.stage]
            ranks["LITGPT_DATASET"] = str(first)
        if code is not None:
            ranks[CODE] = str(code.folder)
        ranks[TIMES] = times.words()
        ending = run_ranks(node, ranks, leave, place=place)
    except Exception as error:
        # A signal can fall between torchrun's start and our hold on it.
        kill_tagged(NODE_DIRECTORY, str(node.own), grace=0)
        if not isinstance(error, TrainLitgptError):
            traceback.print_exc()
        return report(node, fault_of_exception(error), f"{type(error).__name__}: {error}", Ending())
    finally:
        if code is not None:
            code.remove()
    cause = decisive(ending.failures)
    return report(node, fault_of(ending), str(cause) if cause else ending.agent or "", ending, place=place)


@contextlib.contextmanager
def kept(node: Node) -> Iterator[None]:
    """Logs and error files are brought to where the node is asked to keep them, if that is elsewhere."""
    if node.log_uri is None:
        yield
        return
    from litgpt_demo.storage import open_storage

    if open_storage(node.log_uri).address() == str(node.directory.resolve()):
        yield
        return
    life = os.environ.get("LITGPT_RESTART", "")
    uploader = LogUploader(
        node.directory,
        node.log_uri,
        node.meet.node_rank,
        life=int(life) if life.isdecimal() else 0,
        interval=node.log_every,
    )
    with uploader, tee(uploader.log):
        yield


def main(argv: Sequence[str]) -> int:
    """`python -m litgpt_demo node`: the exit code is 0 or that of the fault's class."""
    times = NodeTimes()
    node = parse(unpack(argv, os.environ), os.environ)
    attempt = (node.log_uri or str(node.directory)).rstrip("/").rpartition("/")[2]  # its folder is called by its number
    times.attempt = int(attempt) if attempt.isdecimal() and len(attempt) < 10 else 0
    path = node.directory / f"node-{node.meet.node_rank}.json"
    with kept(node):
        outcome = run(node, times, path)
        outcome |= {"started": times.started, "ended": times.started + times.elapsed(), **times.phases()}
        with contextlib.suppress(OSError):  # the findings already said that the directory cannot be written
            write_whole(path, outcome)
        if outcome["fault"]:
            number, code = node.meet.node_rank, outcome["exit_code"]
            print(f"node {number} ends with {code} ({outcome['fault']}): {outcome['message']}", flush=True)
    shutil.rmtree(node.own / "data", ignore_errors=True)
    return int(outcome["exit_code"])
