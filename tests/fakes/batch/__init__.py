"""GCP Batch and Cloud Logging in the test's own process: gRPC servers of their clients' own protos.

with running_batch() as cloud:          # sets nothing; give cloud.environment to whoever is to use it
    cloud.end(job, 1, 50001)            # tasks are only said to run, until the test says how they end
with running_batch(tmp_path) as cloud:  # tasks are processes of this machine, each on what stands for a VM
    cloud.records[job].vms[1].end(50001)
"""

import contextlib
import json
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
from google.cloud.batch_v1 import types
from google.cloud.logging_v2 import types as logging_types
from google.longrunning import operations_pb2

from launcher.platforms.local.supervisor import reserved_ports

from .vm import Vm

__all__ = ["Cloud", "Vm", "running_batch"]

PARENT = "projects/my-project/locations/us-central1"
State = types.JobStatus.State
TaskState = types.TaskStatus.State
FINAL = {State.SUCCEEDED, State.FAILED, State.CANCELLED}
ENDED = {TaskState.SUCCEEDED, TaskState.FAILED, TaskState.UNEXECUTED}

_TERM = re.compile(r'(?P<field>logName|timestamp|labels\.\w+)(?:>=|=)"(?P<value>[^"]*)"')


class Refused(Exception):
    """A call's end, as gRPC tells it: a code and words."""


@dataclass
class Record:
    """A job, and the VMs of its tasks where they are processes."""

    job: types.Job
    tasks: list[types.Task]
    vms: list[Vm] = field(default_factory=list)
    cancelled: bool = False

    def set(self, state: State) -> None:
        status = self.job.status
        self.tell("STATUS_CHANGED", f"Job state is set from {status.state.name} to {state.name} for job x.")
        status.state = state

    def tell(self, kind: str, text: str) -> None:
        event = types.StatusEvent(type_=kind, description=text, event_time=datetime.now(UTC))
        self.job.status.status_events.append(event)

    def set_task(self, number: int, state: TaskState, code: int = 0) -> None:
        """The exit code is told where a life fails, as it is documented."""
        status, execution = self.tasks[number].status, {"exit_code": code} if code else None
        event = types.StatusEvent(task_state=state, event_time=datetime.now(UTC), task_execution=execution)
        status.status_events.append(event)
        status.state = state

    def end(self, number: int, code: int) -> None:
        """A life of a task is over; another begins where the policy has one."""
        spec = self.job.task_groups[0].task_spec
        events = self.tasks[number].status.status_events
        lives = sum(event.task_state == TaskState.RUNNING for event in events)
        final = [exit for policy in spec.lifecycle_policies for exit in policy.action_condition.exit_codes]
        if code and lives <= spec.max_retry_count and code not in final and not self.cancelled:
            self.set_task(number, TaskState.PENDING, code)
            self.set_task(number, TaskState.RUNNING)
            return
        self.set_task(number, TaskState.FAILED if code else TaskState.SUCCEEDED, code)
        states = {task.status.state for task in self.tasks}
        if states <= ENDED:
            bad = State.CANCELLED if self.cancelled else State.FAILED
            self.set(State.SUCCEEDED if states == {TaskState.SUCCEEDED} else bad)


class Cloud:
    """What tests see of it. Its methods may be called from any thread."""

    def __init__(self, folder: Path | None) -> None:
        self.records: dict[str, Record] = {}
        self.calls: list[str] = []
        self.entries: list[logging_types.LogEntry] = []
        self.quota = True
        """Without, jobs that come stay QUEUED."""
        self._folder = folder
        self._faults: list[tuple[str, grpc.StatusCode, bool]] = []
        self._lock = threading.RLock()
        self._threads: list[threading.Thread] = []
        self._ports = ExitStack()
        self._server = grpc.server(ThreadPoolExecutor(4))
        for name, call, request_type in (
            ("cloud.batch.v1.BatchService/CreateJob", self._create, types.CreateJobRequest),
            ("cloud.batch.v1.BatchService/GetJob", lambda request: self._found(request.name).job, types.GetJobRequest),
            ("cloud.batch.v1.BatchService/ListJobs", self._list_jobs, types.ListJobsRequest),
            ("cloud.batch.v1.BatchService/ListTasks", self._list_tasks, types.ListTasksRequest),
            ("cloud.batch.v1.BatchService/CancelJob", self._cancel, types.CancelJobRequest),
            ("logging.v2.LoggingServiceV2/ListLogEntries", self._list, logging_types.ListLogEntriesRequest),
        ):
            service, _, method = name.partition("/")
            handler = grpc.unary_unary_rpc_method_handler(self._answering(method, call, request_type))
            answering = grpc.method_handlers_generic_handler(f"google.{service}", {method: handler})
            self._server.add_generic_rpc_handlers((answering,))
        address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        self.environment = {"BATCH_EMULATOR_HOST": address, "LOGGING_EMULATOR_HOST": address}

    def _answering(
        self, method: str, call: Callable[[Any], Any], request_type: Any
    ) -> Callable[[bytes, grpc.ServicerContext], bytes]:
        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            with self._lock:
                self.calls.append(method)
                fault = next((planned for planned in self._faults if planned[0] == method), None)
                try:
                    if fault is None or fault[2]:
                        done = call(request_type.deserialize(request))
                except Refused as error:
                    context.abort(*error.args)
                if fault is not None:
                    self._faults.remove(fault)
                    context.abort(fault[1], f"{method}: {fault[1].name.lower()} (injected)")
                written: bytes = done.SerializeToString() if hasattr(done, "DESCRIPTOR") else type(done).serialize(done)
                return written

        return answer

    # --- calls --------------------------------------------------------------------------------------------------------

    def _create(self, request: types.CreateJobRequest) -> types.Job:
        if request.parent != PARENT:
            raise Refused(grpc.StatusCode.PERMISSION_DENIED, "Permission 'batch.jobs.create' denied")
        name = f"{request.parent}/jobs/{request.job_id}"
        if name in self.records:
            raise Refused(grpc.StatusCode.ALREADY_EXISTS, f"Resource '{name}' already exists")
        job = types.Job(types.Job.to_dict(request.job))
        job.name, job.uid, job.create_time = name, f"{request.job_id[:40]}-{uuid.uuid4().hex[:8]}", datetime.now(UTC)
        job.status.state = State.QUEUED
        waits = types.TaskStatus(state=TaskState.PENDING)
        numbers = range(job.task_groups[0].task_count)
        tasks = [types.Task(name=f"{name}/taskGroups/group0/tasks/{number}", status=waits) for number in numbers]
        record = self.records[name] = Record(job, tasks)
        if self.quota:
            self._begin(record)
        else:
            record.tell("OPERATIONAL_INFO", f"Quota checking process decides to delay scheduling for the job {job.uid}")
        return job

    def _begin(self, record: Record) -> None:
        record.set(State.SCHEDULED)
        record.set(State.RUNNING)
        for number in range(len(record.tasks)):
            record.set_task(number, TaskState.RUNNING)
        if self._folder is None:
            return
        port = self._ports.enter_context(reserved_ports())
        hosts = [f"127.0.0.{number + 2}" for number in range(len(record.tasks))]
        for number in range(len(record.tasks)):
            vm = Vm(self._folder / record.job.uid, record.job, number, hosts=hosts, port=port)
            record.vms.append(vm)
            self._threads.append(
                threading.Thread(target=self._run, args=(record.job.name, number, vm), name="Batch VM")
            )
            self._threads[-1].start()

    def _run(self, job: str, number: int, vm: Vm) -> None:
        self.end(job, number, vm.run(lambda line: self.write(job, number, line)))

    def _found(self, name: str) -> Record:
        if name not in self.records:
            raise Refused(grpc.StatusCode.NOT_FOUND, f"Resource '{name}' was not found")
        return self.records[name]

    def _list_jobs(self, request: types.ListJobsRequest) -> types.ListJobsResponse:
        return types.ListJobsResponse(jobs=[record.job for record in self.records.values()])

    def _list_tasks(self, request: types.ListTasksRequest) -> types.ListTasksResponse:
        return types.ListTasksResponse(tasks=self._found(request.parent.removesuffix("/taskGroups/group0")).tasks)

    def _cancel(self, request: types.CancelJobRequest) -> operations_pb2.Operation:
        record = self._found(request.name)
        if record.job.status.state in FINAL:
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, f"Job {request.name} has ended")
        record.cancelled = True
        record.set(State.CANCELLATION_IN_PROGRESS)
        for number, task in enumerate(record.tasks):
            if record.vms:
                record.vms[number].end()
            elif task.status.state not in ENDED:
                record.end(number, 143)
        return operations_pb2.Operation(name=f"{request.name}/cancel")

    def _list(self, request: logging_types.ListLogEntriesRequest) -> logging_types.ListLogEntriesResponse:
        terms = {term["field"]: term["value"] for term in _TERM.finditer(request.filter)}
        assert len(terms) == len(request.filter.split(" AND ")), f"what is meant by {request.filter}?"
        found = [
            entry
            for entry in sorted(self.entries, key=lambda entry: (entry.timestamp, entry.insert_id))
            if (entry.log_name, entry.labels["job_uid"]) == (terms["logName"], terms["labels.job_uid"])
            and entry.timestamp >= datetime.fromisoformat(terms["timestamp"])
        ]
        start, end = int(request.page_token or 0), int(request.page_token or 0) + request.page_size
        more = str(end) if len(found) > end else ""
        return logging_types.ListLogEntriesResponse(entries=found[start:end], next_page_token=more)

    # --- what tests do ------------------------------------------------------------------------------------------------

    def refuse(self, method: str, code: grpc.StatusCode, *, times: int = 1, after: bool = False) -> None:
        """Answer the next calls with an error, `after` the work was done if so asked."""
        self._faults += [(method, code, after)] * times

    def end(self, job: str, task: int, code: int) -> None:
        """A life of a task ends with this code."""
        with self._lock:
            self.records[job].end(task, code)

    def live(self) -> list[str]:
        """Jobs that have not ended."""
        return [name for name, record in self.records.items() if record.job.status.state not in FINAL]

    def entry(self, job: str, task: int, text: str) -> logging_types.LogEntry:
        """A line of a task as Cloud Logging keeps it, which nobody can read before it is among the entries."""
        uid = self.records[job].job.uid
        made = logging_types.LogEntry(
            log_name="projects/my-project/logs/batch_task_logs",
            insert_id=uuid.uuid4().hex,
            timestamp=datetime.now(UTC),
            labels={"job_uid": uid, "task_id": f"task/{uid}-group0-{task}/0/0"},
        )
        try:
            made.json_payload = json.loads(text)
        except (ValueError, AttributeError):
            made.text_payload = text
        return made

    def write(self, job: str, task: int, text: str) -> None:
        with self._lock:
            self.entries.append(self.entry(job, task, text))

    def close(self) -> None:
        for record in self.records.values():
            for vm in record.vms:
                vm.end(50000)
        for thread in self._threads:
            thread.join()
        self._server.stop(None).wait()
        self._ports.close()


@contextlib.contextmanager
def running_batch(folder: Path | None = None) -> Iterator[Cloud]:
    """A cloud; with a folder its tasks are processes, whose VMs have their files there."""
    with contextlib.closing(Cloud(folder)) as cloud:
        yield cloud
