"""The two services behind one address, in a thread of their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.cloud.batch_v1 import types
from google.cloud.logging_v2 import types as logging_types
from google.longrunning import operations_pb2
from kubernetes_cluster.isolation import Isolation, Namespaces, Plain

from .admission import RefusedCallError
from .entries import Entries
from .service import FINAL, Service
from .vm import Settings, Started

PROJECT = "my-project"
Answer = TypeVar("Answer")


@dataclass
class _Fault:
    """An answer that is no answer."""

    method: str
    code: grpc.StatusCode
    times: int
    after: bool


class Cloud:
    """What tests see of it. Its methods may be called from any thread."""

    def __init__(self, folder: Path, shared: Sequence[Path]) -> None:
        self._folder, self._shared = folder, [folder, *shared]
        self._faults: list[_Fault] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="batch", daemon=True)
        self.calls: list[str] = []
        self.log_delay = 0.0

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()
        self._do(self._start())

    def stop(self) -> None:
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _start(self) -> None:
        root = os.geteuid() == 0 and sys.platform == "linux"
        self._isolation: Isolation = Namespaces(self._shared) if root else Plain()
        await self._isolation.start()
        entries = Entries(PROJECT, lambda: self.log_delay)
        self._service = Service(PROJECT, self._folder, self._isolation, entries)
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers(tuple(self._handlers()))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()

    async def _stop(self) -> None:
        await self._service.close()
        await self._server.stop(0.2)
        await self._isolation.stop()

    def _do(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    # --- gRPC ---------------------------------------------------------------------------------------------------------

    def _handlers(self) -> Iterator[grpc.GenericRpcHandler]:
        service = self._service
        batch = {
            "CreateJob": (service.create_job, types.CreateJobRequest, types.Job),
            "GetJob": (service.get_job, types.GetJobRequest, types.Job),
            "ListJobs": (service.list_jobs, types.ListJobsRequest, types.ListJobsResponse),
            "GetTask": (service.get_task, types.GetTaskRequest, types.Task),
            "ListTasks": (service.list_tasks, types.ListTasksRequest, types.ListTasksResponse),
            "CancelJob": (service.cancel_job, types.CancelJobRequest, operations_pb2.Operation),
            "DeleteJob": (service.delete_job, types.DeleteJobRequest, operations_pb2.Operation),
        }
        yield self._handler("google.cloud.batch.v1.BatchService", batch)
        operations = {
            "GetOperation": (service.get_operation, operations_pb2.GetOperationRequest, operations_pb2.Operation)
        }
        yield self._handler("google.longrunning.Operations", operations)

        async def list_entries(
            request: logging_types.ListLogEntriesRequest,
        ) -> logging_types.ListLogEntriesResponse:
            return service.entries.read(request)

        entries = {
            "ListLogEntries": (
                list_entries, logging_types.ListLogEntriesRequest, logging_types.ListLogEntriesResponse,
            )
        }  # fmt: skip
        yield self._handler("google.logging.v2.LoggingServiceV2", entries)

    def _handler(self, name: str, methods: dict[str, tuple[Any, Any, Any]]) -> grpc.GenericRpcHandler:
        made = {
            method: grpc.unary_unary_rpc_method_handler(
                self._answering(method, call),
                request_deserializer=_reader(asked),
                response_serializer=_writer(answer),
            )
            for method, (call, asked, answer) in methods.items()
        }
        return grpc.method_handlers_generic_handler(name, made)

    def _answering(
        self, method: str, call: Callable[[Any], Awaitable[Any]]
    ) -> Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]:
        async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
            self.calls.append(method)
            fault = next((one for one in self._faults if one.method == method and one.times > 0), None)
            if fault is not None:
                fault.times -= 1
                if fault.after:
                    await call(request)
                await context.abort(fault.code, f"{method}: {fault.code.name.lower()} (injected)")
            try:
                return await call(request)
            except RefusedCallError as error:
                await context.abort(error.code, error.message)

        return answer

    # --- what tests do ------------------------------------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, str]:
        """What makes clients come here."""
        return dict.fromkeys(("BATCH_EMULATOR_HOST", "LOGGING_EMULATOR_HOST"), f"127.0.0.1:{self.port}")

    @property
    def options(self) -> Settings:
        return self._service.settings

    @property
    def gateway(self) -> str:
        """Under which address VMs reach this machine."""
        return self._isolation.gateway

    @property
    def started(self) -> list[Started]:
        return list(self._service.started)

    @property
    def created(self) -> list[str]:
        return list(self._service.created)

    def export(self, server: str, path: str, folder: Path) -> None:
        """An NFS server that VMs can mount."""
        self._service.exports[server, path] = folder

    def refuse(self, method: str, code: grpc.StatusCode, *, times: int = 1, after: bool = False) -> None:
        """Answer the next calls with an error, `after` the work was done if so asked."""
        self._faults.append(_Fault(method, code, times, after))

    def live(self) -> list[str]:
        """Jobs that have not ended."""
        return [name for name, record in self._service.records.items() if record.state not in FINAL]

    def task_states(self, job: str) -> list[str]:
        """Return the states of a job's tasks, in their order."""
        return [task.status.state.name for task in self._service.records[job].tasks]

    def vms(self) -> list[str]:
        """VMs that are up."""
        records = self._service.records.values()
        return [vm.name for record in records for vm in record.all_vms if vm.sandbox is not None]

    def commands(self, task: int) -> list[str]:
        """How the programs of that task's VM were called, in all jobs."""
        records = self._service.records.values()
        return [line for record in records for vm in record.all_vms if vm.task == task for line in vm.commands]

    def preempt(self, job: str, task: int) -> None:
        self._do(self._service.lose(job, task, 50001))

    def silence(self, job: str, task: int) -> None:
        """Its VM stops reporting, but goes on."""
        self._do(self._service.lose(job, task, 50002, alive=True))

    def reboot(self, job: str, task: int) -> None:
        self._do(self._service.lose(job, task, 50003))

    def freeze(self, job: str, task: int) -> None:
        self._do(self._service.lose(job, task, 50004, alive=True))

    def remake(self, job: str, task: int) -> None:
        self._do(self._service.lose(job, task, 50006))


def _reader(kind: Any) -> Callable[[bytes], Any]:
    return kind.deserialize if hasattr(kind, "deserialize") else kind.FromString


def _writer(kind: Any) -> Callable[[Any], bytes]:
    if hasattr(kind, "serialize"):
        return kind.serialize
    return lambda message: message.SerializeToString()


@contextlib.contextmanager
def running_batch(folder: Path, *, shared: Sequence[Path] = ()) -> Iterator[Cloud]:
    """A cloud whose VMs keep their files in `folder` and see those in `shared`."""
    folder.mkdir(parents=True, exist_ok=True)
    cloud = Cloud(folder, shared)
    cloud.start()
    try:
        yield cloud
    finally:
        cloud.stop()
