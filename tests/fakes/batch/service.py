"""The Batch service: jobs with their states and events, their tasks, and what is asked of them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import grpc
from google.cloud.batch_v1 import types
from google.longrunning import operations_pb2
from google.protobuf import any_pb2
from kubernetes_cluster.isolation import Isolation

from .admission import RefusedCallError, admit, admit_request_id
from .entries import Entries
from .vm import Gang, Settings, Started, Vm

State = types.JobStatus.State
TaskState = types.TaskStatus.State

FINAL = {State.SUCCEEDED, State.FAILED, State.CANCELLED}
REASONS = {
    50001: "Spot VM preemption", 50002: "VM reporting timeout", 50003: "VM rebooted during execution",
    50004: "VM and task are unresponsive", 50005: "task runs over the maximum runtime",
    50006: "VM recreated during execution",
}  # fmt: skip


@dataclass
class Record:
    """A job, and what runs it."""

    job: types.Job
    tasks: list[types.Task]
    gang: Gang
    vms: dict[int, Vm] = field(default_factory=dict)
    all_vms: list[Vm] = field(default_factory=list)
    running: asyncio.Task[None] | None = None
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def state(self) -> State:
        return self.job.status.state

    @property
    def name(self) -> str:
        return self.job.name


@dataclass
class Service:
    """Of one project."""

    project: str
    folder: Path
    isolation: Isolation
    entries: Entries
    settings: Settings = field(default_factory=Settings)
    records: dict[str, Record] = field(default_factory=dict)
    exports: dict[tuple[str, str], Path] = field(default_factory=dict)
    started: list[Started] = field(default_factory=list)
    created: list[str] = field(default_factory=list)
    """Every job that was created, deleted ones too."""
    _requests: dict[str, tuple[bytes, types.Job]] = field(default_factory=dict)
    _operations: dict[str, Callable[[], operations_pb2.Operation]] = field(default_factory=dict)

    # --- calls --------------------------------------------------------------------------------------------------------

    async def create_job(self, request: types.CreateJobRequest) -> types.Job:
        admit(request, self.project)
        name = f"{request.parent}/jobs/{request.job_id}"
        asked = types.CreateJobRequest.serialize(request)
        if request.request_id in self._requests:
            before, job = self._requests[request.request_id]
            if before != asked:
                raise RefusedCallError(grpc.StatusCode.INVALID_ARGUMENT, "request_id was used for another request")
            return job
        if name in self.records:
            raise RefusedCallError(grpc.StatusCode.ALREADY_EXISTS, f"Resource '{name}' already exists")
        self._admit_exports(request.job)
        record = self._new(name, request)
        self.records[name] = record
        self.created.append(name)
        if request.request_id:
            self._requests[request.request_id] = (asked, record.job)
        record.running = asyncio.get_running_loop().create_task(self._run(record))
        return record.job

    async def get_job(self, request: types.GetJobRequest) -> types.Job:
        return self._found(request.name).job

    async def list_jobs(self, request: types.ListJobsRequest) -> types.ListJobsResponse:
        prefix = f"{request.parent}/jobs/"
        return types.ListJobsResponse(
            jobs=[record.job for name, record in self.records.items() if name.startswith(prefix)]
        )

    async def get_task(self, request: types.GetTaskRequest) -> types.Task:
        job, _, _ = request.name.partition("/taskGroups/")
        for task in self._found(job).tasks:
            if task.name == request.name:
                return task
        raise RefusedCallError(grpc.StatusCode.NOT_FOUND, f"Resource '{request.name}' was not found")

    async def list_tasks(self, request: types.ListTasksRequest) -> types.ListTasksResponse:
        """Two on a page: whoever asks has to turn it."""
        match = re.fullmatch(r"(.*)/taskGroups/group0", request.parent)
        if match is None:
            raise RefusedCallError(grpc.StatusCode.NOT_FOUND, f"Resource '{request.parent}' was not found")
        tasks, start = self._found(match[1]).tasks, int(request.page_token or 0)
        more = str(start + 2) if len(tasks) > start + 2 else ""
        return types.ListTasksResponse(tasks=tasks[start : start + 2], next_page_token=more)

    async def cancel_job(self, request: types.CancelJobRequest) -> operations_pb2.Operation:
        record = self._found(request.name)
        if request.request_id:
            admit_request_id(request.request_id)
        if record.state in FINAL:
            raise RefusedCallError(
                grpc.StatusCode.FAILED_PRECONDITION, f"Job {request.name} is in state {record.state.name}"
            )
        if not record.cancelled.is_set():
            self._set(record, State.CANCELLATION_IN_PROGRESS)
            record.cancelled.set()
        return self._operation(lambda: record.state in FINAL, types.CancelJobResponse())

    async def delete_job(self, request: types.DeleteJobRequest) -> operations_pb2.Operation:
        record = self._found(request.name)
        self._set(record, State.DELETION_IN_PROGRESS)
        record.cancelled.set()
        asyncio.get_running_loop().create_task(self._remove(record))
        return self._operation(lambda: request.name not in self.records, None)

    async def get_operation(self, request: operations_pb2.GetOperationRequest) -> operations_pb2.Operation:
        if request.name not in self._operations:
            raise RefusedCallError(grpc.StatusCode.NOT_FOUND, f"Resource '{request.name}' was not found")
        return self._operations[request.name]()

    def _found(self, name: str) -> Record:
        if name not in self.records:
            raise RefusedCallError(grpc.StatusCode.NOT_FOUND, f"Resource '{name}' was not found")
        return self.records[name]

    def _operation(
        self, done: Callable[[], bool], response: types.CancelJobResponse | None
    ) -> operations_pb2.Operation:
        name = f"projects/{self.project}/locations/x/operations/operation-{uuid.uuid4().hex}"

        def told() -> operations_pb2.Operation:
            made = operations_pb2.Operation(name=name, done=done())
            if made.done:
                packed = any_pb2.Any()
                if response is None:
                    packed.type_url = "type.googleapis.com/google.protobuf.Empty"
                else:
                    packed.Pack(types.CancelJobResponse.pb(response))
                made.response.CopyFrom(packed)
            return made

        self._operations[name] = told
        return told()

    def _admit_exports(self, job: types.Job) -> None:
        for volume in job.task_groups[0].task_spec.volumes:
            if "nfs" in volume and (volume.nfs.server, volume.nfs.remote_path) not in self.exports:
                raise RefusedCallError(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"this stand-in has no NFS export {volume.nfs.server}:{volume.nfs.remote_path}",
                )

    # --- life ---------------------------------------------------------------------------------------------------------

    def _new(self, name: str, request: types.CreateJobRequest) -> Record:
        now = datetime.now(UTC)
        uid = f"{request.job_id[:40].rstrip('-')}-{uuid.uuid4().hex[:8]}-0"
        job = types.Job(types.Job.to_dict(request.job))
        job.name, job.uid, job.create_time, job.update_time = name, uid, now, now
        group = job.task_groups[0]
        group.name = f"{name}/taskGroups/group0"
        group.parallelism = group.parallelism or group.task_count
        job.status.state = State.QUEUED
        tasks = [
            types.Task(name=f"{group.name}/tasks/{number}", status=types.TaskStatus(state=TaskState.PENDING))
            for number in range(group.task_count)
        ]

        def log(task: int, life: int, line: str) -> None:
            labels = {"job_uid": uid, "task_group_name": "group0", "task_id": f"task/{uid}-group0-{task}/{life}/0"}
            self.entries.write("batch_task_logs", line, labels)

        gang = Gang(
            job=job,
            settings=self.settings,
            isolation=self.isolation,
            folder=self.folder / uid,
            exports=self.exports,
            log=log,
            started=self.started,
        )
        return Record(job, tasks, gang)

    async def _run(self, record: Record) -> None:
        count = record.gang.group.task_count
        if not await self._quota(record, count):
            self._finish(record, State.CANCELLED)
            return
        self._set(record, State.SCHEDULED)
        at_once = asyncio.Semaphore(record.gang.group.parallelism)
        runs = [self._task(record, number, at_once) for number in range(count)]
        stopping = asyncio.ensure_future(self._stop(record))
        await asyncio.gather(*runs)
        stopping.cancel()
        for vm in record.all_vms:
            await vm.delete()
        if record.cancelled.is_set():
            self._finish(record, State.CANCELLED)
        else:
            bad = any(task.status.state == TaskState.FAILED for task in record.tasks)
            self._finish(record, State.FAILED if bad else State.SUCCEEDED)

    async def _quota(self, record: Record, count: int) -> bool:
        """Until there is enough; False if the job is cancelled before."""
        told = False
        while self._used() + count > self.settings.vms:
            if not told:
                told = True
                text = (
                    f"Quota checking process decides to delay scheduling for the job {record.job.uid} due to "
                    f"inadequate quotas [Quota: CPUS, limit: {self.settings.vms}, usage: {self._used()}, "
                    f"wanted: {count}]."
                )
                record.job.status.status_events.append(
                    types.StatusEvent(type_="OPERATIONAL_INFO", description=text, event_time=datetime.now(UTC))
                )
            await asyncio.sleep(0.02)
            if record.cancelled.is_set():
                return False
        return not record.cancelled.is_set()

    def _used(self) -> int:
        return sum(
            record.gang.group.task_count
            for record in self.records.values()
            if record.state in {State.SCHEDULED, State.RUNNING, State.CANCELLATION_IN_PROGRESS}
        )

    async def _task(self, record: Record, number: int, at_once: asyncio.Semaphore) -> None:
        async with at_once:
            life = 0
            while not record.cancelled.is_set():
                vm = Vm(record.gang, number, life)
                record.vms[number] = vm
                record.all_vms.append(vm)
                await vm.boot()
                if record.cancelled.is_set():
                    break
                self._task_event(record, number, TaskState.ASSIGNED)
                if record.state == State.SCHEDULED:
                    self._set(record, State.RUNNING)
                self._task_event(record, number, TaskState.RUNNING)
                code = await vm.run()
                if not code:
                    self._task_event(record, number, TaskState.SUCCEEDED, code)
                    return
                if life < record.gang.group.task_spec.max_retry_count and self._tries_again(record, code):
                    await vm.delete()
                    self._task_event(record, number, TaskState.PENDING, code)
                    life += 1
                    continue
                self._task_event(record, number, TaskState.FAILED, code)
                return
            if record.tasks[number].status.state in {TaskState.PENDING, TaskState.ASSIGNED}:
                self._task_event(record, number, TaskState.UNEXECUTED)

    def _tries_again(self, record: Record, code: int) -> bool:
        """As the texts on LifecyclePolicy.Action have it."""
        policies = record.gang.group.task_spec.lifecycle_policies
        if record.cancelled.is_set() or not policies:
            return not record.cancelled.is_set()
        listed = code in policies[0].action_condition.exit_codes
        return listed if policies[0].action == types.LifecyclePolicy.Action.RETRY_TASK else not listed

    async def _stop(self, record: Record) -> None:
        await record.cancelled.wait()
        await asyncio.gather(*(vm.stop() for vm in record.vms.values()))

    async def _remove(self, record: Record) -> None:
        if record.running is not None:
            await asyncio.wait({record.running})
        del self.records[record.name]

    def _finish(self, record: Record, state: State) -> None:
        for number, task in enumerate(record.tasks):
            if task.status.state in {TaskState.PENDING, TaskState.ASSIGNED}:
                self._task_event(record, number, TaskState.UNEXECUTED)
        if record.state != State.DELETION_IN_PROGRESS:
            self._set(record, state)

    # --- events -------------------------------------------------------------------------------------------------------

    def _set(self, record: Record, state: State) -> None:
        status = record.job.status
        text = f"Job state is set from {status.state.name} to {state.name} for job {record.name}."
        now = datetime.now(UTC)
        status.status_events.append(types.StatusEvent(type_="STATUS_CHANGED", description=text, event_time=now))
        status.state = state
        record.job.update_time = now

    def _task_event(self, record: Record, number: int, state: TaskState, code: int | None = None) -> None:
        status = record.tasks[number].status
        vm = record.vms.get(number)
        where = f" on zones/1/instances/{vm.name}" if vm else ""
        why = f" due to {REASONS.get(code, 'task failure')} with exit code {code}" if code else ""
        event = types.StatusEvent(
            type_="STATUS_CHANGED",
            description=f"Task state is updated from {status.state.name} to {state.name}{where}{why}.",
            event_time=datetime.now(UTC),
            task_state=state,
        )
        if code:  # documented: only where the task fails
            event.task_execution = types.TaskExecution(exit_code=code)
        status.status_events.append(event)
        status.state = state

    # --- faults -------------------------------------------------------------------------------------------------------

    async def lose(self, name: str, task: int, code: int, *, alive: bool = False) -> None:
        await self._found(name).vms[task].lose(code, alive=alive)

    async def close(self) -> None:
        """End everything."""
        for record in self.records.values():
            record.cancelled.set()
            for vm in record.all_vms:
                await vm.lose(50000)
        for record in list(self.records.values()):
            if record.running is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(record.running), 20)
