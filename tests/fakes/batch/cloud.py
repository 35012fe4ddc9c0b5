"""The two services behind one address: jobs with their states and events, and a thread for each task that runs."""

from __future__ import annotations

import contextlib
import itertools
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
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

from .admission import RefusedCallError, admit, admit_request_id
from .entries import Entries
from .vm import Settings, Started, Vm

PROJECT = "my-project"
State = types.JobStatus.State
TaskState = types.TaskStatus.State
FINAL = {State.SUCCEEDED, State.FAILED, State.CANCELLED}


@dataclass
class Record:
    """A job, and what runs it."""

    cloud: Cloud
    job: types.Job
    tasks: list[types.Task]
    folder: Path
    port: int
    """Of node 0: nobody else on this machine has it."""
    vms: list[Vm] = field(default_factory=list)
    """Of all lives; of each task the last one counts."""
    arrived: dict[str, set[int]] = field(default_factory=dict)
    """At barriers."""
    cancelled: bool = False
    used: int = 0
    """Machines of the quota."""

    @property
    def state(self) -> State:
        return self.job.status.state

    @property
    def group(self) -> types.TaskGroup:
        return self.job.task_groups[0]

    @property
    def names(self) -> list[str]:
        """The host names of the tasks' VMs."""
        return [vm.name for vm in self.current().values()]

    def current(self) -> dict[int, Vm]:
        return {vm.task: vm for vm in sorted(self.vms, key=lambda vm: (vm.task, vm.life))}

    def log(self, task: int, life: int, line: str) -> None:
        uid = self.job.uid
        labels = {"job_uid": uid, "task_group_name": "group0", "task_id": f"task/{uid}-group0-{task}/{life}/0"}
        self.cloud.entries.write("batch_task_logs", line, labels)

    def set(self, state: State) -> None:
        status = self.job.status
        text = f"Job state is set from {status.state.name} to {state.name} for job {self.job.name}."
        self._note(status, types.StatusEvent(type_="STATUS_CHANGED", description=text), state)

    def task_event(self, number: int, state: TaskState, code: int = 0) -> None:
        """The exit code is told where a life fails, as it is documented."""
        status = self.tasks[number].status
        why = f" due to task failure with exit code {code}" if code else ""
        text = f"Task state is updated from {status.state.name} to {state.name}{why}."
        event = types.StatusEvent(type_="STATUS_CHANGED", description=text, task_state=state)
        if code:
            event.task_execution = types.TaskExecution(exit_code=code)
        self._note(status, event, state)

    def _note(self, status: types.JobStatus | types.TaskStatus, event: types.StatusEvent, state: Any) -> None:
        event.event_time = datetime.now(UTC)
        with self.cloud.changed:
            status.status_events.append(event)
            status.state = state
            self.cloud.changed.notify_all()

    # --- life, in threads of its own ----------------------------------------------------------------------------------

    def run(self) -> None:
        count = self.group.task_count
        if not self.cloud.take(self, count):
            self._finish(State.CANCELLED)
            return
        self.set(State.SCHEDULED)
        self.cloud.wait(lambda: self.cancelled, seconds=self.cloud.options.boot)
        self.vms = [Vm(self, number, 0) for number in range(count)]
        self.set(State.RUNNING)
        with ThreadPoolExecutor(count, thread_name_prefix="batch task") as pool:
            list(pool.map(self._task, range(count)))
        failed = any(task.status.state == TaskState.FAILED for task in self.tasks)
        self._finish(State.CANCELLED if self.cancelled else State.FAILED if failed else State.SUCCEEDED)

    def _task(self, number: int) -> None:
        while not self.cancelled:
            vm = self.current()[number]
            self.task_event(number, TaskState.ASSIGNED)
            self.task_event(number, TaskState.RUNNING)
            if not (code := vm.run()):
                self.task_event(number, TaskState.SUCCEEDED)
                return
            if vm.life == self.group.task_spec.max_retry_count or not self._tries_again(code):
                self.task_event(number, TaskState.FAILED, code)
                return
            self.used -= 1
            self.task_event(number, TaskState.PENDING, code)
            if self.cloud.take(self, 1):
                self.vms.append(Vm(self, number, vm.life + 1))

    def _tries_again(self, code: int) -> bool:
        """As the texts on LifecyclePolicy.Action have it; ours list what is not tried again."""
        policies = self.group.task_spec.lifecycle_policies
        listed = policies and code in policies[0].action_condition.exit_codes
        return not self.cancelled and not listed

    def _finish(self, state: State) -> None:
        for number, task in enumerate(self.tasks):
            if task.status.state == TaskState.PENDING:
                self.task_event(number, TaskState.UNEXECUTED)
        self.used = 0
        if self.state == State.DELETION_IN_PROGRESS:
            del self.cloud.records[self.job.name]
        else:
            self.set(state)

    def stop(self) -> None:
        self.cancelled = True
        for vm in self.current().values():
            vm.stop()
        self.cloud.tell()


class Cloud:
    """What tests see of it. Its methods may be called from any thread."""

    def __init__(self, folder: Path) -> None:
        self.options = Settings()
        self.entries = Entries(PROJECT)
        self.records: dict[str, Record] = {}
        self.exports: dict[tuple[str, str], Path] = {}
        self.started: list[Started] = []
        self.created: list[str] = []
        """Every job that was created, deleted ones too."""
        self.calls: list[str] = []
        self.port = 0
        self._folder = folder
        self._faults: list[tuple[str, grpc.StatusCode, bool]] = []
        self.changed = threading.Condition()
        self._numbers = itertools.count(2)
        self._threads: list[threading.Thread] = []
        self._ports = ExitStack()

    def tell(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def wait(self, what: Callable[[], bool], seconds: float | None = None) -> None:
        """Until that is so."""
        with self.changed:
            self.changed.wait_for(what, seconds)

    def new_address(self) -> str:
        return f"127.0.0.{next(self._numbers)}"

    def take(self, record: Record, count: int) -> bool:
        """Wait for so many machines; False if the job is cancelled before."""

        def used() -> int:
            return sum(one.used for one in self.records.values())

        with self.changed:
            if used() + count > self.options.vms:
                text = f"Quota checking process decides to delay scheduling for the job {record.job.uid}"
                event = types.StatusEvent(type_="OPERATIONAL_INFO", description=text, event_time=datetime.now(UTC))
                record.job.status.status_events.append(event)
            self.changed.wait_for(lambda: record.cancelled or used() + count <= self.options.vms)
            record.used += count
        return not record.cancelled

    # --- gRPC ---------------------------------------------------------------------------------------------------------

    def serve(self) -> grpc.Server:
        server = grpc.server(ThreadPoolExecutor(4))
        services: dict[str, dict[str, tuple[Callable[[Any], Any], Any]]] = {
            "google.cloud.batch.v1.BatchService": {
                "CreateJob": (self._create, types.CreateJobRequest),
                "GetJob": (lambda request: self._found(request.name).job, types.GetJobRequest),
                "ListJobs": (self._list, types.ListJobsRequest),
                "ListTasks": (self._list_tasks, types.ListTasksRequest),
                "CancelJob": (self._cancel, types.CancelJobRequest),
                "DeleteJob": (self._delete, types.DeleteJobRequest),
            },
            "google.logging.v2.LoggingServiceV2": {
                "ListLogEntries": (self.entries.read, logging_types.ListLogEntriesRequest),
            },
        }
        for name, methods in services.items():
            made = {
                method: grpc.unary_unary_rpc_method_handler(
                    self._answering(method, call),
                    request_deserializer=asked.deserialize,
                )
                for method, (call, asked) in methods.items()
            }
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, made),))
        self.port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        return server

    def _answering(self, method: str, call: Callable[[Any], Any]) -> Callable[[Any, grpc.ServicerContext], bytes]:
        def answer(request: Any, context: grpc.ServicerContext) -> bytes:
            with self.changed:
                self.calls.append(method)
                fault = next((one for one in self._faults if one[0] == method), None)
                if fault is not None:
                    self._faults.remove(fault)
                    if fault[2]:
                        with contextlib.suppress(RefusedCallError):
                            call(request)
                    context.abort(fault[1], f"{method}: {fault[1].name.lower()} (injected)")
                try:
                    done = call(request)
                except RefusedCallError as error:
                    context.abort(error.code, error.message)
                written: bytes = done.SerializeToString() if hasattr(done, "DESCRIPTOR") else type(done).serialize(done)
                return written

        return answer

    def _create(self, request: types.CreateJobRequest) -> types.Job:
        admit(request, PROJECT)
        name = f"{request.parent}/jobs/{request.job_id}"
        if name in self.records:
            raise RefusedCallError(grpc.StatusCode.ALREADY_EXISTS, f"Resource '{name}' already exists")
        for volume in request.job.task_groups[0].task_spec.volumes:
            if (volume.nfs.server, volume.nfs.remote_path) not in self.exports:
                raise RefusedCallError(grpc.StatusCode.INVALID_ARGUMENT, f"there is no NFS export {volume.nfs}")
        uid = f"{request.job_id[:40]}-{uuid.uuid4().hex[:8]}"
        job = types.Job(types.Job.to_dict(request.job))
        job.name, job.uid, job.create_time, job.status.state = name, uid, datetime.now(UTC), State.QUEUED
        pending = types.TaskStatus(state=TaskState.PENDING)
        tasks = [
            types.Task(name=f"{name}/taskGroups/group0/tasks/{number}", status=pending)
            for number in range(job.task_groups[0].task_count)
        ]
        port = self._ports.enter_context(reserved_ports())
        record = self.records[name] = Record(self, job, tasks, self._folder / uid, port)
        self.created.append(name)
        self._threads.append(threading.Thread(target=record.run, name=f"batch job {name}"))
        self._threads[-1].start()
        return job

    def _found(self, name: str) -> Record:
        if name not in self.records:
            raise RefusedCallError(grpc.StatusCode.NOT_FOUND, f"Resource '{name}' was not found")
        return self.records[name]

    def _list(self, request: types.ListJobsRequest) -> types.ListJobsResponse:
        found = [one.job for name, one in self.records.items() if name.startswith(f"{request.parent}/jobs/")]
        return types.ListJobsResponse(jobs=found)

    def _list_tasks(self, request: types.ListTasksRequest) -> types.ListTasksResponse:
        """Two on a page: whoever asks has to turn it."""
        tasks = self._found(request.parent.removesuffix("/taskGroups/group0")).tasks
        start = int(request.page_token or 0)
        more = str(start + 2) if len(tasks) > start + 2 else ""
        return types.ListTasksResponse(tasks=tasks[start : start + 2], next_page_token=more)

    def _cancel(self, request: types.CancelJobRequest) -> operations_pb2.Operation:
        record = self._found(request.name)
        admit_request_id(request.request_id)
        if record.state in FINAL:
            text = f"Job {request.name} is in state {record.state.name}"
            raise RefusedCallError(grpc.StatusCode.FAILED_PRECONDITION, text)
        if not record.cancelled:
            record.set(State.CANCELLATION_IN_PROGRESS)
            record.stop()
        return operations_pb2.Operation(name=f"{request.name}/cancel")

    def _delete(self, request: types.DeleteJobRequest) -> operations_pb2.Operation:
        record = self._found(request.name)
        record.set(State.DELETION_IN_PROGRESS)
        record.stop()
        return operations_pb2.Operation(name=f"{request.name}/delete")

    # --- what tests do ------------------------------------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, str]:
        """What makes clients come here."""
        return dict.fromkeys(("BATCH_EMULATOR_HOST", "LOGGING_EMULATOR_HOST"), f"127.0.0.1:{self.port}")

    def export(self, server: str, path: str, folder: Path) -> None:
        """An NFS server that VMs can mount."""
        self.exports[server, path] = folder

    def refuse(self, method: str, code: grpc.StatusCode, *, times: int = 1, after: bool = False) -> None:
        """Answer the next calls with an error, `after` the work was done if so asked."""
        self._faults += [(method, code, after)] * times

    def live(self) -> list[str]:
        """Jobs that have not ended."""
        return [name for name, record in self.records.items() if record.state not in FINAL]

    def vms(self) -> list[str]:
        """VMs that are up."""
        return [name for record in self.records.values() if record.used for name in record.names]

    def commands(self, task: int) -> list[str]:
        """How the programs of that task's VM were called, in all jobs."""
        vms = [vm for record in self.records.values() for vm in record.vms if vm.task == task]
        return [line for vm in vms for line in vm.commands]

    def preempt(self, job: str, task: int) -> None:
        self.lose(job, task, 50001)

    def lose(self, job: str, task: int, code: int) -> None:
        self.records[job].current()[task].lose(code)
        self.tell()

    def close(self) -> None:
        for record in list(self.records.values()):
            record.stop()
            for vm in record.current().values():
                vm.lose(50000)
        self.tell()
        for thread in self._threads:
            thread.join()
        self._ports.close()


@contextlib.contextmanager
def running_batch(folder: Path, *, shared: Sequence[Path] = ()) -> Iterator[Cloud]:
    """A cloud whose VMs keep their files in `folder`; those of this machine (`shared`) they see as they are."""
    cloud = Cloud(folder)
    server = cloud.serve()
    try:
        yield cloud
    finally:
        cloud.close()
        server.stop(None).wait()
