"""Failures that this machine cannot cause: put together from what platforms, drivers and libraries document.

The words are those of the addresses given; the rest is what a node of ours makes of them. Where a platform's objects
tell the end of a node, its own reader reads them here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launcher.platforms.kubernetes import names
from launcher.platforms.kubernetes.states import end_of
from litgpt_demo.errors import EXIT_CODES, Fault, RankFailure, fault_of_exit_code, gave_up_waiting
from litgpt_demo.node.agent import Ending, fault_of
from litgpt_demo.node.evidence import Trace
from litgpt_demo.node.main import report
from litgpt_demo.node.rendezvous import parse
from tests.faults.case import Case, Status

NOON = 1_750_000_000.0
XID = "https://docs.nvidia.com/deploy/xid-errors/"
PODS = "https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions"
PRESSURE = "https://kubernetes.io/docs/concepts/scheduling-eviction/node-pressure-eviction/"
BATCH = "https://cloud.google.com/batch/docs/troubleshooting#reserved-exit-codes"
WATCHDOG = "https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp"
GLOO = "https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/ProcessGroupGloo.cpp"
LOADER = "https://github.com/pytorch/pytorch/blob/main/torch/utils/data/_utils/signal_handling.py"
NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"

_TRACEBACK = "Traceback (most recent call last):"
REMOTE = (
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp, remote process exited or there was a "
    "network error, NCCL version 2.28.9 ncclRemoteError: A call failed possibly due to a network error or a remote "
    "process exiting prematurely."
)
PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.7]:20403"


def timed_out(rank: int, *, enqueued: int, completed: int) -> list[Trace]:
    """Return the lines of a rank whose watchdog found that a collective timed out."""
    return [
        Trace(source="output", rank=rank, text=text)
        for text in (
            f"[rank{rank}]:[E ProcessGroupNCCL.cpp:683] [Rank {rank}] Watchdog caught collective operation timeout: "
            f"WorkNCCL(SeqNum={enqueued}, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600029 "
            "milliseconds before timing out.",
            f"[rank{rank}]:[E ProcessGroupNCCL.cpp:2241] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] failure detected "
            f"by watchdog at work sequence id: {enqueued} PG status: last enqueued work: {enqueued}, last completed "
            f"work: {completed}",
        )
    ]


def told_to_dump(rank: int, by: int, *, enqueued: int) -> Trace:
    """Return the line of a rank which another rank's watchdog asked for a dump."""
    text = (
        f"[rank{rank}]:[E ProcessGroupNCCL.cpp:1794] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Received a dump "
        f"signal due to a collective timeout from  rank {by} and we will try our best to dump the debug info. Last "
        f"enqueued NCCL work: {enqueued}, last completed NCCL work: {enqueued}."
    )
    return Trace(source="output", rank=rank, text=text)


def failed(local: int, message: str, *, code: int = 1, after: float = 0.0) -> RankFailure:
    return RankFailure(
        local_rank=local, exit_code=code, message=message, time=NOON + after, waits=gave_up_waiting(message)
    )


def watchdog(local: int, rank: int, *, after: float = 0.0) -> RankFailure:
    said = (
        f"what():  [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=41, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds "
        "before timing out."
    )
    return failed(local, said, code=-6, after=after)


class Nodes:
    """The nodes of a job that ended badly."""

    def __init__(self, nodes: int, processes: int) -> None:
        self.nodes, self.processes = nodes, processes
        self.reports: dict[str, Any] = {}
        self.codes: dict[int, int] = {}
        self.evictions: dict[int, str] = {}
        self.lines: list[tuple[int, str]] = []

    def told(
        self, node: int, *failures: RankFailure, traces: Sequence[Trace] = (), stopped: Sequence[int] = (),
        asked: float | None = None, after: float = 1.0, memory: bool = False,
    ) -> Nodes:  # fmt: skip
        """A node that could report its end; `stopped` are local ranks."""
        ending = Ending(
            exit_code=1,
            asked=None if asked is None else NOON + asked,
            host_ran_out_of_memory=memory,
            failures=failures,
            stopped=tuple(stopped),
            traces=tuple(traces),
        )
        flags = (
            f"--nodes {self.nodes} --node-rank {node} --processes {self.processes} --master gpt-0.gpt:29500 --run-id r "
            "--directory /runs -- train.py"
        )
        fault = fault_of(ending)
        content = report(parse(flags.split(), {}), fault, "", failures, ending=ending)
        self.reports[f"node-{node}.json"] = {
            **json.loads(json.dumps(content)),
            "host": f"gke-pool-{node}",
            "ended": NOON + after,
        }
        self.codes[node] = int(content["exit_code"])
        self._print(node, failures)
        return self

    def _print(self, node: int, failures: Sequence[RankFailure]) -> None:
        """Add what a node's log holds: its ranks' last words, and torchrun's."""
        for one in failures:
            rank = node * self.processes + one.local_rank
            self.lines += [(node, f"[rank{rank}]:[rank{rank}]: {line}") for line in (_TRACEBACK, one.message)]
        for one in sorted(failures, key=lambda failure: failure.time)[:1]:
            rank = node * self.processes + one.local_rank
            fields = {
                "time": time.strftime("%Y-%m-%d_%H:%M:%S", time.gmtime(one.time)),
                "rank": f"{rank} (local_rank: {one.local_rank})",
                "exitcode": f"{one.exit_code} (pid: 31)",
            }
            self.lines += [(node, "Root Cause (first observed failure):"), (node, "[0]:")]
            self.lines += [(node, f"  {name:<10}: {value}") for name, value in fields.items()]

    def ended(self, node: int, code: int) -> Nodes:
        """A node of which the platform tells no more than an exit code."""
        self.codes[node] = code
        return self

    def pod(self, node: int, status: Mapping[str, Any]) -> Nodes:
        """A node that is known by its pod alone."""
        end = end_of({"metadata": {"name": f"gpt-{node}"}, "status": status})
        assert end is not None
        self.codes[node] = end.code
        if end.eviction:
            self.evictions[node] = end.eviction
        return self

    def case(
        self, name: str, about: str, source: str, fault: Fault, *culprits: tuple[int, int | None], held_out: bool
    ) -> Case:
        words = [f"node {node} ended with {code} ({fault_of_exit_code(code)})" for node, code in self.codes.items()]
        return Case(
            name=name,
            about=about,
            how="documented",
            source=source,
            held_out=held_out,
            nodes=self.nodes,
            processes=self.processes,
            fault=fault,
            culprits=culprits,
            status=Status(native=", ".join(words), exit_codes=self.codes, evictions=self.evictions),
            reports=self.reports,
            logs=tuple(self.lines),
        )


def terminated(code: int, reason: str, **more: Any) -> dict[str, Any]:
    """The status of a pod whose container ended."""
    state = {"terminated": {"exitCode": code, "reason": reason}}
    return {"phase": "Failed", "containerStatuses": [{"name": names.NODE, "state": state}], **more}


def disrupted(reason: str, message: str) -> dict[str, Any]:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
    return terminated(143, "Error", conditions=[condition])


def xid(number: int, words: str) -> Trace:
    return Trace(source="kernel", text=f"NVRM: Xid (PCI:0000:4e:00): {number}, pid=2431, name=python, {words}")


def tuned() -> Iterator[Case]:
    """Yield what the rules were fixed on."""
    lost = Nodes(4, 2)
    for node in (0, 1, 3):
        lost.told(
            node, watchdog(0, 2 * node, after=600), after=601, traces=timed_out(2 * node, enqueued=41, completed=40)
        )
    lost.told(
        2,
        failed(0, "torch.AcceleratorError: CUDA error: unspecified launch failure", code=-6, after=610),
        traces=[xid(79, "GPU has fallen off the bus.")],
        after=611,
    )
    yield lost.case("xid-79", "a GPU of node 2 is lost", XID, Fault.NODE, (2, 4), held_out=False)

    behind = Nodes(2, 4)
    behind.told(
        0,
        *(watchdog(n, n) for n in range(4)),
        traces=[t for n in range(4) for t in timed_out(n, enqueued=41, completed=40)],
    )
    behind.told(
        1,
        *(watchdog(n, 4 + n) for n in (0, 2, 3)),
        traces=[t for n in (4, 6, 7) for t in timed_out(n, enqueued=41, completed=40)]
        + [told_to_dump(5, 0, enqueued=40)],
        stopped=[1],
    )
    yield behind.case(
        "watchdog-behind", "rank 5 has begun one collective fewer", WATCHDOG, Fault.HANG, (1, 5), held_out=False
    )

    gone = Nodes(3, 2).told(0, failed(0, REMOTE)).told(1, failed(1, REMOTE))
    yield gone.case("nccl-peer-gone", "node 2 vanished without a trace", NCCL, Fault.NODE, (2, None), held_out=False)

    for code, fault, about in (
        (50001, Fault.PREEMPTED, "a Spot VM is taken away"),
        (50005, Fault.USER, "a task ran longer than it may"),
    ):
        taken = Nodes(2, 1).told(0, failed(0, PEER)).ended(1, code)
        yield taken.case(f"batch-{code}", about, BATCH, fault, (1, None), held_out=False)

    full = Nodes(2, 1).told(0, failed(0, PEER)).pod(1, terminated(137, "OOMKilled"))
    source = "https://kubernetes.io/docs/tasks/configure-pod-container/assign-memory-resource/"
    yield full.case("pod-oomkilled", "a pod exceeds its memory", source, Fault.OUT_OF_MEMORY, (1, None), held_out=False)

    message = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 92Mi. "
    evicted = Nodes(3, 1).told(0, failed(0, PEER)).told(2, asked=6.0, after=6.5)
    evicted.pod(1, {"phase": "Failed", "reason": "Evicted", "message": message})
    yield evicted.case(
        "evicted-memory",
        "a kubelet evicts a pod under pressure",
        PRESSURE,
        Fault.OUT_OF_MEMORY,
        (1, None),
        held_out=False,
    )

    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB"
    cuda = Nodes(2, 2).told(0, failed(0, REMOTE)).told(1, failed(1, oom), stopped=[0])
    source = "https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management"
    yield cuda.case("cuda-memory", "a GPU is out of memory", source, Fault.OUT_OF_MEMORY, (1, 3), held_out=False)


def held_out() -> Iterator[Case]:
    """Yield what was put together after the rules had been fixed."""
    ecc = "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"
    broken = Nodes(3, 2).told(0, failed(1, REMOTE)).told(2, failed(0, REMOTE))
    broken.told(1, failed(0, ecc, code=-6), traces=[xid(48, "DBE (double bit error) ECC Error")])
    yield broken.case("xid-48", "a GPU's memory is broken", XID, Fault.NODE, (1, 2), held_out=True)

    link = Nodes(2, 4).told(0, watchdog(2, 2), traces=[xid(74, "NVLink: fatal error detected on link 3")])
    link.told(1, *(watchdog(n, 4 + n) for n in range(4)))
    yield link.case("xid-74", "an NVLink fails, and everybody waits", XID, Fault.NODE, (0, 2), held_out=True)

    illegal = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    wrong = Nodes(2, 2).told(
        0, failed(1, illegal, code=-6), traces=[xid(31, "MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0")]
    )
    wrong.told(1, failed(0, REMOTE))
    yield wrong.case("xid-31", "a kernel writes where it may not", XID, Fault.USER, (0, 1), held_out=True)

    barrier = Nodes(2, 2)
    barrier.told(
        0, failed(0, "RuntimeError: [Rank 0]: Ranks 3 failed to pass monitoredBarrier in 30000 ms"), stopped=[1]
    )
    barrier.told(1, failed(0, PEER), stopped=[1])
    yield barrier.case("monitored-barrier", "rank 3 does not come", GLOO, Fault.HANG, (1, 3), held_out=True)

    lagging = Nodes(4, 1)
    for node in (0, 2, 3):
        lagging.told(node, watchdog(0, node, after=node), traces=timed_out(node, enqueued=812, completed=811), after=5)
    lagging.told(1, stopped=[0], traces=[told_to_dump(1, 0, enqueued=811)], asked=10.0, after=10.5)
    yield lagging.case("watchdog-asked", "rank 1 stays behind", WATCHDOG, Fault.HANG, (1, 1), held_out=True)

    for name, reason, message in (
        ("pod-preempted", "PreemptionByScheduler", "gke-system: preempting to accommodate a higher priority pod"),
        ("pod-tainted", "DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint"),
        ("node-shut-down", "TerminationByKubelet", "Pod was terminated in response to imminent node shutdown."),
    ):
        taken = Nodes(2, 2).told(1, failed(0, PEER)).pod(0, disrupted(reason, message))
        yield taken.case(name, f"a pod's condition says {reason}", PODS, Fault.PREEMPTED, (0, None), held_out=True)

    message = "The node was low on resource: ephemeral-storage. Threshold quantity: 10Gi, available: 9Gi. "
    evicted = Nodes(2, 1).told(0, failed(0, PEER))
    evicted.pod(1, {"phase": "Failed", "reason": "Evicted", "message": message})
    yield evicted.case("evicted-disk", "a kubelet evicts a pod", PRESSURE, Fault.NODE, (1, None), held_out=True)

    for code, about in ((50002, "a VM stops reporting"), (50003, "a VM is rebooted"), (50006, "a VM is made anew")):
        vm = Nodes(3, 1).told(0, failed(0, PEER)).told(2, asked=5.5, after=6.0).ended(1, code)
        yield vm.case(f"batch-{code}", about, BATCH, Fault.NODE, (1, None), held_out=True)

    shm = (
        "RuntimeError: DataLoader worker (pid 231) is killed by signal: Bus error. It is possible that dataloader's "
        "workers are out of shared memory. Please try to raise your shared memory limit."
    )
    small = Nodes(2, 2).told(0, failed(0, PEER), stopped=[1]).told(1, failed(1, shm), stopped=[0])
    yield small.case(
        "loader-shared-memory", "/dev/shm is too small", LOADER, Fault.OUT_OF_MEMORY, (1, 3), held_out=True
    )

    worker = "RuntimeError: DataLoader worker (pid 231) is killed by signal: Killed. "
    killed = Trace(
        source="kernel", text="Memory cgroup out of memory: Killed process 231 (pt_data_worker) total-vm:9GB"
    )
    eaten = Nodes(2, 1).told(1, failed(0, PEER)).told(0, failed(0, worker), traces=[killed])
    yield eaten.case("loader-killed", "a loader's worker is killed", LOADER, Fault.OUT_OF_MEMORY, (0, 0), held_out=True)

    fuse = "OSError: [Errno 107] Transport endpoint is not connected: '/data/train.bin'"
    mount = Nodes(2, 2).told(0, failed(0, PEER)).told(1, failed(0, fuse))
    source = "https://github.com/GoogleCloudPlatform/gcs-fuse-csi-driver/issues/50"
    yield mount.case("bucket-mount", "a mount's sidecar dies", source, Fault.NODE, (1, 2), held_out=True)

    reduction = (
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This "
        "error indicates that your module has parameters that were not used in producing loss."
    )
    unused = Nodes(2, 1).told(0, failed(0, reduction)).told(1, failed(0, reduction, after=0.1))
    source = "https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html"
    yield unused.case("unused-parameters", "DDP misses gradients", source, Fault.USER, (0, 0), (1, 1), held_out=True)

    yield (
        Nodes(2, 1).told(0, failed(0, PEER)).ended(1, EXIT_CODES[Fault.PREEMPTED])
        .case("pod-asked", "a pod ends with our code alone", PODS, Fault.PREEMPTED, (1, None), held_out=True)
    )  # fmt: skip
