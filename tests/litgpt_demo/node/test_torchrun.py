"""torchrun: its command line, and what its ranks left behind; for torchrun itself see test_node.py."""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from litgpt_demo.errors import Fault, NetworkError
from litgpt_demo.node import torchrun
from litgpt_demo.node.torchrun import FAILURES, Rendezvous, read_failures, torchrun_command


def rank_folder(log_dir: Path, rank: int) -> Path:
    folder = log_dir / "owt_x1" / "attempt_0" / str(rank)
    folder.mkdir(parents=True)
    return folder


def told(log_dir: Path, *ranks: Mapping[str, object]) -> None:
    (log_dir / FAILURES).write_text(json.dumps({"ranks": ranks}))


def test_a_ranks_error_file_and_its_exit_code_come_together(tmp_path: Path) -> None:
    """The file is as torch 2.13's ErrorHandler.record_exception writes it."""
    extra = {"py_callstack": "Traceback …\nDataError: train.bin is cut off\n", "timestamp": "1795217060"}
    content = {"message": {"message": "DataError: train.bin is cut off", "extraInfo": extra}}
    (rank_folder(tmp_path, 1) / "error.json").write_text(json.dumps(content))
    rank_folder(tmp_path, 0)
    told(tmp_path, {"local_rank": 1, "exit_code": 1, "time": 5}, {"local_rank": 0, "exit_code": -15, "time": 6})
    peer, cause = read_failures(tmp_path)
    assert (cause.local_rank, cause.exit_code, cause.fault) == (1, 1, Fault.DATA)
    assert cause.traceback[-1] == "DataError: train.bin is cut off"
    assert (peer.local_rank, peer.exit_code, peer.time, peer.bystander) == (0, -15, 6, True)


def test_a_rank_without_error_file_is_read_from_what_it_printed_last(tmp_path: Path) -> None:
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
    told(tmp_path, *({"local_rank": rank, "exit_code": 1, "time": 5} for rank in (0, 1)))
    assert [(one.message, one.fault) for one in read_failures(tmp_path)] == [
        ("", Fault.UNKNOWN), ("RuntimeError: Connection closed by peer", Fault.NETWORK),
    ]  # fmt: skip


def test_a_port_that_is_taken_is_a_fault_of_the_network_that_another_attempt_may_not_meet() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(NetworkError, match="Address already in use"):
        torchrun._store_on_loopback("127.0.0.1", taken.getsockname()[1], 0)


def test_a_torchrun_without_a_flag_for_the_grace_is_not_given_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of torch 2.2 and 2.11; what follows the dashes is the program's, whatever it looks like."""
    import torch.distributed.run

    meet = Rendezvous(nodes=4, node_rank=2, host="10.0.0.5", port=29500, run_id="owt-1a2b-1")
    command = torchrun_command(meet, processes=1, program=["x.py", "--shutdown-timeout=9"], log_dir="/l", grace=25)
    given, newer = command[3:], argparse.ArgumentParser()
    newer.add_argument("--shutdown-timeout")
    monkeypatch.setattr(torch.distributed.run, "get_args_parser", lambda: newer)
    assert torchrun._known_arguments(given) == (given, None)
    monkeypatch.setattr(torch.distributed.run, "get_args_parser", argparse.ArgumentParser)
    known, grace = torchrun._known_arguments(given)
    assert grace == 25
    assert known == [word for word in given if word != "--shutdown-timeout=25"]
    assert known[-1] == "--shutdown-timeout=9"


# The disk has room for 20 bytes, for more before the last line, and none in the end.
FULL_FOR_A_WHILE = """
import resource
from litgpt_demo.node.printing import drop_what_does_not_fit

def room(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

drop_what_does_not_fit()
room(20)
for line in ("a whole line", "one that is cut", "one that is lost"):
    print(line, flush=True)
room(34)
print("the next one", flush=True)
print("x" * 100_000)
raise SystemExit(40)
"""


@pytest.mark.parametrize("flags", [(), ("-u",)])
def test_a_line_that_finds_no_room_is_glued_to_no_other_and_ends_no_program(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    with (tmp_path / "log").open("w") as log:
        assert subprocess.run([sys.executable, *flags, "-c", FULL_FOR_A_WHILE], stdout=log).returncode == 40
    assert (tmp_path / "log").read_text().splitlines() == ["a whole line", "one tha", "the next one"]
