"""What a node picks from its kernel's log, its container's counters and its ranks' output when it ends badly."""

from __future__ import annotations

import pickle
import time
from pathlib import Path

import pytest

from litgpt_demo.node.evidence import gather, kernel_lines, recorded, recorder_prefix

TELLING = [
    "NVRM: Xid (PCI:0000:4e:00): 79, pid=2431, name=python, GPU has fallen off the bus.",
    "Out of memory: Killed process 4711 (python) total-vm:20GB, anon-rss:15GB",
    "mlx5_core 0000:0c:00.0: mlx5_health_check: device's health compromised",
]


def test_lines_of_the_kernels_that_tell_of_a_fault_are_picked_but_for_those_of_an_earlier_job() -> None:
    now = time.clock_gettime(time.CLOCK_MONOTONIC)
    ago = [(3600, TELLING[0]), (20, "eth0: link becomes ready"), *((10, line) for line in TELLING), (3, "started")]
    log = "".join(f"<6>[{now - seconds:12.6f}] {words}\n" for seconds, words in ago)
    assert kernel_lines(log, since=time.time() - 60) == TELLING


def test_of_a_rank_the_lines_of_torch_and_nccl_are_picked_and_no_secret(tmp_path: Path) -> None:
    told = "[rank3]: [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)"
    noise = [f"step {number} loss 3.1" for number in range(1000)]
    secret = "what():  GET https://user:hunter2@example.com failed"
    (tmp_path / "stderr.log").write_text("\n".join([*noise, told, told, secret, *noise]))
    traces = gather({3: tmp_path, 4: tmp_path / "none"}, recorders=tmp_path, since=time.time(), killed=2)
    output = [trace for trace in traces if trace.source == "output"]
    assert [trace.text for trace in output][:1] == [told]
    assert {trace.rank for trace in output} == {3}
    assert not any("hunter2" in trace.text for trace in traces)
    assert [trace.text[:19] for trace in traces if trace.source == "memory"] == ["the kernel killed 2"]


def test_how_far_a_rank_had_come_is_read_from_torchs_own_dump(tmp_path: Path) -> None:
    """A dump of torch 2.13, after five sums, without its entries."""
    status = {"last_enqueued_collective": 5, "last_started_collective": -1, "last_completed_collective": 4}
    dump = {"version": "2.10", "pg_status": {"0": status}, "pg_config": {}, "entries": []}
    Path(f"{recorder_prefix(tmp_path)}3").write_bytes(pickle.dumps(dump, protocol=2))
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
