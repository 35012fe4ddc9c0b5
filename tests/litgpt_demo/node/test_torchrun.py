"""torchrun: its command line, what its ranks left behind, and what a node picks when it ends badly."""

import fcntl
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, PContext, SignalException
from torch.distributed.elastic.utils.api import macros

from litgpt_demo.errors import FailureClass
from litgpt_demo.node import torchrun
from litgpt_demo.node.agent import torchrun_command
from litgpt_demo.node.evidence import RECORDER, gather, kernel_lines, read_failures, recorded
from litgpt_demo.node.rendezvous import Node
from litgpt_demo.node.torchrun import FAILURES


def rank_folder(log_dir: Path, rank: int) -> Path:
    folder = log_dir / "owt_x1" / "attempt_0" / str(rank)
    folder.mkdir(parents=True)
    return folder


def expected(log_dir: Path, *ranks: Mapping[str, object]) -> None:
    (log_dir / FAILURES).write_text(json.dumps({"ranks": ranks}))


def test_a_ranks_error_file_and_its_exit_code_come_together(tmp_path: Path) -> None:
    """The file is as torch 2.13's ErrorHandler.record_exception writes it."""
    extra = {"py_callstack": "Traceback …\nDataError: train.bin is cut off\n", "timestamp": "1795217060"}
    content = {"message": {"message": "DataError: train.bin is cut off", "extraInfo": extra}}
    (rank_folder(tmp_path, 1) / "error.json").write_text(json.dumps(content))
    rank_folder(tmp_path, 0)
    expected(tmp_path, {"local_rank": 1, "exit_code": 1, "time": 5}, {"local_rank": 0, "exit_code": -15, "time": 6})
    peer, cause = read_failures(tmp_path)[0]
    assert (cause.local_rank, cause.exit_code, cause.fault) == (1, 1, FailureClass.DATA)
    assert cause.traceback[-1] == "DataError: train.bin is cut off"
    assert (peer.local_rank, peer.exit_code, peer.time, peer.secondary) == (0, -15, 6, True)


def test_rank_without_error_file_is_read_from_its_output(tmp_path: Path) -> None:
    traceback = "Traceback (most recent call last):\n"
    outputs = [
        "UserWarning: connection refused, falling back\n",
        f"{traceback}  an earlier one\nKeyError: 'handled'\n"
        f"[rank1]: {traceback}[rank1]:   File 'x.py', line 3\n[rank1]: RuntimeError: Connection closed by peer\n",
    ]
    for rank, output in enumerate(outputs):
        folder = rank_folder(tmp_path, rank)
        (folder / "stderr.log").write_text(output)
        (folder / "error.json").write_text('{"message": {"mess')  # half written, as good as none
    expected(tmp_path, *({"local_rank": rank, "exit_code": 1, "time": 5} for rank in (0, 1)))
    assert [(item.message, item.fault) for item in read_failures(tmp_path)[0]] == [
        ("", FailureClass.UNKNOWN), ("RuntimeError: Connection closed by peer", FailureClass.NETWORK),
    ]  # fmt: skip


@pytest.mark.parametrize("mode", [0o700, 0o2775])
def test_folder_of_logs_has_the_mode_of_its_parent(mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second user of a shared root reads the logs; a private folder stays private."""
    monkeypatch.setattr(tempfile, "mkdtemp", tempfile.mkdtemp)
    (logs := tmp_path / "ranks").mkdir()
    logs.chmod(mode)
    torchrun._share_logs(logs)
    made = DefaultLogsSpecs(log_dir=str(logs))._make_log_dir(str(logs), "run")
    assert Path(made).stat().st_mode & 0o7777 == mode


def test_torchrun_prints_no_traceback_when_asked_to_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node's last line says why it ends; twenty lines of torch's would stand before it."""

    def asked(_: object) -> None:
        raise SignalException("Process 1 got signal: 15", sigval=signal.SIGTERM)

    monkeypatch.setattr("torch.distributed.run.run", asked)
    monkeypatch.setattr(PContext, "close", PContext.close)
    monkeypatch.setattr(tempfile, "mkdtemp", tempfile.mkdtemp)
    assert torchrun.main([f"--log-dir={tmp_path}", "--master-addr=n0", "--master-port=1", "a.py"]) == 1
    assert read_failures(tmp_path) == ([], "SignalException: Process 1 got signal: 15")


def test_ranks_have_their_grace_under_an_old_torchrun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As those of torch 2.2 and 2.11, which close with a default of 30 s whatever they were told."""
    closed: list[tuple[object, int]] = []

    def close(ranks: object, death_sig: object = None, timeout: int = 30) -> None:
        closed.append((death_sig, timeout))

    monkeypatch.setattr(PContext, "close", close)
    monkeypatch.setenv(torchrun.SHUTDOWN_TIMEOUT, "25")
    torchrun._bound_grace()
    for arguments in ((), (signal.SIGTERM,)):
        PContext.close(SimpleNamespace(), *arguments)  # type: ignore[arg-type]
    assert closed == [(None, torchrun.PEER_GRACE), (signal.SIGTERM, 25)]


# The disk has room for 20 bytes, for more before the last line, and none in the end.
FULL_FOR_A_WHILE = """
import resource, sys
from litgpt_demo.node.logs import drop_lines_without_room

def room(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

drop_lines_without_room()
room(20)
for line in ("a whole line", "one that is cut", "one that is lost"):
    print(line, flush=True)
print("a warning of another stream", file=sys.stderr, flush=True)
room(34)
print("the next one", flush=True)
print("x" * 100_000)
raise SystemExit(40)
"""

# Others take all room of the log's disk, and again what is freed.
FULL_BUT_FOR_WARNINGS = """
import pathlib, shutil, sys
from litgpt_demo.node.logs import drop_lines_without_room

def fill():
    with (pathlib.Path(sys.argv[1]) / "ballast").open("ab") as ballast:
        ballast.write(b"0" * shutil.disk_usage(sys.argv[1]).free)

drop_lines_without_room()
print("the first step", flush=True)
for step in range(100):
    fill()
    print(f"{step} a row of metrics {'x' * 200}", flush=True)
    print(f"[rank0]:warning: checkpoint of step {step} was not saved", flush=True)
print("a warning without an end", end="")
"""


@pytest.mark.parametrize("flags", [(), ("-u",)])
def test_log_has_a_line_completely_or_not_at_all(flags: tuple[str, ...], tmp_path: Path) -> None:
    with (tmp_path / "log").open("a") as log:
        command = [sys.executable, *flags, "-c", FULL_FOR_A_WHILE]
        assert subprocess.run(command, stdout=log, stderr=log).returncode == 40
    assert (tmp_path / "log").read_text().splitlines() == ["a whole line", "the next one"]


def test_locked_terminal_never_blocks_a_node() -> None:
    reader, terminal = os.openpty()
    fcntl.lockf(terminal, fcntl.LOCK_EX)
    program = "from litgpt_demo.node import logs; logs.drop_lines_without_room(); print('hello')"
    subprocess.run([sys.executable, "-c", program], stdout=terminal, check=True)
    assert os.read(reader, 100) == b"hello\r\n"
    os.close(terminal)
    os.close(reader)


def test_a_full_disk_has_room_for_warnings(small_disk: Path) -> None:
    with (small_disk / "log").open("a") as log:
        command = [sys.executable, "-c", FULL_BUT_FOR_WARNINGS, str(small_disk)]
        subprocess.run(command, stdout=log, stderr=log, check=True)
    first, *lines = (small_disk / "log").read_text().splitlines()
    warnings = [f"[rank0]:warning: checkpoint of step {step} was not saved" for step in range(100)]
    assert first == "the first step"
    assert [line for line in lines if "warning" in line] == [*warnings, "a warning without an end"]


TELLING = [
    "NVRM: Xid (PCI:0000:4e:00): 79, pid=2431, name=python, GPU has fallen off the bus.",
    "Out of memory: Killed process 4711 (python) total-vm:20GB, anon-rss:15GB",
    "mlx5_core 0000:0c:00.0: mlx5_health_check: device's health compromised",
]


def test_kernel_lines_of_faults_are_picked_since_the_start() -> None:
    now = time.clock_gettime(time.CLOCK_MONOTONIC)
    ago = [(3600, TELLING[0]), (20, "eth0: link becomes ready"), *((10, line) for line in TELLING), (3, "started")]
    log = "".join(f"<6>[{now - seconds:12.6f}] {message}\n" for seconds, message in ago)
    assert kernel_lines(log, since=time.time() - 60) == TELLING


def test_picked_lines_of_torch_or_nccl_have_no_secret(tmp_path: Path) -> None:
    expected = "[rank3]: [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)"
    noise = [f"step {number} loss 3.1" for number in range(1000)]
    secret = "what():  GET https://user:hunter2@example.com failed"
    (tmp_path / "stderr.log").write_text("\n".join([*noise, expected, expected, secret, *noise]))
    traces = gather({3: tmp_path, 4: tmp_path / "none"}, recorders=tmp_path, since=time.time(), killed=2)
    output = [trace for trace in traces if trace.source == "output"]
    assert [trace.text for trace in output][:1] == [expected]
    assert {trace.rank for trace in output} == {3}
    assert not any("hunter2" in trace.text for trace in traces)
    assert [trace.text[:19] for trace in traces if trace.source == "memory"] == ["the kernel killed 2"]


def test_how_far_a_rank_had_come_is_read_from_torchs_own_dump(tmp_path: Path) -> None:
    """A dump of torch 2.13, after five sums, without its entries."""
    status = {"last_enqueued_collective": 5, "last_started_collective": -1, "last_completed_collective": 4}
    dump = {"version": "2.10", "pg_status": {"0": status}, "pg_config": {}, "entries": []}
    (tmp_path / f"{RECORDER}3").write_bytes(pickle.dumps(dump, protocol=2))
    [trace] = gather({3: tmp_path / "none", 4: tmp_path / "none"}, recorders=tmp_path, since=time.time(), killed=0)
    assert (trace.source, trace.rank) == ("recorder", 3)
    assert trace.text.startswith("its flight recorder: last enqueued work: 5, last completed work: 4")


class Calling:
    """A pickle that would make a file where it is loaded."""

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, ("called", "w")


def test_a_dump_that_calls_something_is_none_and_calls_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status = {"last_enqueued_collective": 1, "last_completed_collective": 1}
    dumps = ({"pg_status": {"0": status}, "entries": Calling()}, {"pg_status": {"0": {}}}, [1, 2, 3])
    for content in (*map(pickle.dumps, dumps), b"", b"\x80\x05\xff"):
        Path("dump").write_bytes(content)
        assert recorded(Path("dump")) is None
    assert not Path("called").exists()


def test_arguments_of_a_program_reach_it_as_they_were_written() -> None:
    """torchrun replaces macros in them."""
    program = ("/a$b.py", "--cost=$5", "$$x", "$local_rank", "${local_rank}", "plain")
    node = Node(nodes=1, node_rank=0, host="h", port=1, run_id="a", processes=1, directory=Path("/d"), program=program)
    command = torchrun_command(node, log_dir="/logs")
    assert tuple(macros.substitute(command[-len(program) :], "0")) == program
