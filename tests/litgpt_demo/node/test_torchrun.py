from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from litgpt_demo.errors import Fault, fault_of_exception
from litgpt_demo.node.torchrun import (
    FAILURES,
    Rendezvous,
    _known_arguments,
    _store_on_loopback,
    agent_failure,
    read_failures,
    torchrun_command,
)

MEET = Rendezvous(nodes=4, node_rank=2, host="10.0.0.5", port=29500, run_id="owt-1a2b-1")


def test_the_command_line_says_who_we_are_and_where_all_meet() -> None:
    command = torchrun_command(MEET, processes=8, program=["-m", "litgpt_demo", "train"], log_dir="/logs", grace=25)
    assert command[:3] == [sys.executable, "-m", "litgpt_demo.node.torchrun"]
    assert {
        "--nnodes=4",
        "--node-rank=2",
        "--nproc-per-node=8",
        "--master-addr=10.0.0.5",
        "--master-port=29500",
        "--rdzv-id=owt-1a2b-1",
        "--max-restarts=0",
        "--shutdown-timeout=25",
        "--log-dir=/logs",
    } <= set(command)
    assert command[-4:] == ["-m", "--", "litgpt_demo", "train"]


def rank_folder(log_dir: Path, rank: int, *, run: str = "owt_x1") -> Path:
    folder = log_dir / run / "attempt_0" / str(rank)
    folder.mkdir(parents=True)
    return folder


def told(log_dir: Path, *ranks: dict[str, object]) -> None:
    log_dir.mkdir(exist_ok=True)
    (log_dir / FAILURES).write_text(json.dumps({"ranks": ranks}))


def error_file(folder: Path, message: str) -> None:
    """As torch 2.13's ErrorHandler.record_exception writes it."""
    stack = f"Traceback (most recent call last):\n  File …\n{message}\n"
    content = {"message": {"message": message, "extraInfo": {"py_callstack": stack, "timestamp": "1795217060"}}}
    (folder / "error.json").write_text(json.dumps(content))


def test_nothing_failed_where_nothing_was_left(tmp_path: Path) -> None:
    assert read_failures(tmp_path) == []
    assert agent_failure(tmp_path) is None
    rank_folder(tmp_path, 0)
    assert read_failures(tmp_path) == []


def test_a_ranks_error_file_and_its_exit_code_come_together(tmp_path: Path) -> None:
    error_file(rank_folder(tmp_path, 1), "DataError: train.bin is cut off")
    rank_folder(tmp_path, 0)
    told(tmp_path, {"local_rank": 1, "exit_code": 1, "time": 5}, {"local_rank": 0, "exit_code": -15, "time": 6})
    peer, cause = read_failures(tmp_path)
    assert (cause.local_rank, cause.exit_code, cause.fault) == (1, 1, Fault.DATA)
    assert cause.traceback[-1] == "DataError: train.bin is cut off"
    assert (peer.local_rank, peer.exit_code, peer.time, peer.bystander) == (0, -15, 6, True)


def test_error_files_speak_for_themselves_where_torchrun_was_killed(tmp_path: Path) -> None:
    error_file(rank_folder(tmp_path, 3), "Preempted: saved step 12")
    (only,) = read_failures(tmp_path)
    assert (only.local_rank, only.exit_code, only.fault) == (3, None, Fault.PREEMPTED)


def test_a_rank_without_error_file_is_read_from_what_it_printed_last(tmp_path: Path) -> None:
    output = (
        "Traceback (most recent call last):\n  an earlier one\nKeyError: 'handled'\n"
        "[rank1]: Traceback (most recent call last):\n[rank1]:   File 'x.py', line 3\n"
        "[rank1]: RuntimeError: Connection closed by peer\n"
    )
    (rank_folder(tmp_path, 1) / "stderr.log").write_text(output)
    told(tmp_path, {"local_rank": 1, "exit_code": 1, "time": 5})
    (only,) = read_failures(tmp_path)
    assert only.message == "RuntimeError: Connection closed by peer"
    assert only.fault is Fault.NETWORK
    assert only.traceback[0] == "Traceback (most recent call last):"


def test_warnings_are_not_taken_for_the_cause(tmp_path: Path) -> None:
    (rank_folder(tmp_path, 0) / "stderr.log").write_text("UserWarning: connection refused, falling back\n")
    told(tmp_path, {"local_rank": 0, "exit_code": 1, "time": 5})
    (only,) = read_failures(tmp_path)
    assert (only.message, only.fault) == ("", Fault.UNKNOWN)
    assert only.traceback == ("UserWarning: connection refused, falling back",)


def test_a_half_written_error_file_is_as_good_as_none(tmp_path: Path) -> None:
    (rank_folder(tmp_path, 0) / "error.json").write_text('{"message": {"mess')
    told(tmp_path, {"local_rank": 0, "exit_code": -9, "time": 5})
    assert [one.fault for one in read_failures(tmp_path)] == [Fault.NODE]


@pytest.mark.training
def test_a_port_that_is_taken_is_a_fault_of_the_network_that_another_attempt_may_not_meet(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        meet = Rendezvous(nodes=1, node_rank=0, host="127.0.0.1", port=taken.getsockname()[1], run_id="alone")
        command = torchrun_command(meet, processes=1, program=["-c", "pass"], log_dir=str(tmp_path / "logs"))
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    fell_over = agent_failure(tmp_path / "logs")
    assert fell_over is not None
    assert "cannot be listened on: Address already in use" in fell_over
    assert fault_of_exception(fell_over) is Fault.NETWORK


@pytest.mark.training
def test_a_torch_whose_store_takes_no_socket_listens_as_it_does_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed

    def store(host: str, port: int, world_size: int | None, is_master: bool, **others: Any) -> object:
        if "master_listen_fd" in others:
            raise TypeError("__init__(): incompatible constructor arguments")
        return object()

    monkeypatch.setattr(torch.distributed, "TCPStore", store)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert _store_on_loopback("127.0.0.1", port, 0) is None
    socket.create_server(("127.0.0.1", port)).close()  # it is left to torch


def test_a_torchrun_without_a_flag_for_the_grace_is_not_given_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of torch 2.2 and 2.11; what follows the dashes is the program's, whatever it looks like."""
    import torch.distributed.run

    command = torchrun_command(MEET, processes=1, program=["x.py", "--shutdown-timeout=9"], log_dir="/l", grace=25)
    given, newer = command[3:], argparse.ArgumentParser()
    newer.add_argument("--shutdown-timeout")
    monkeypatch.setattr(torch.distributed.run, "get_args_parser", lambda: newer)
    assert _known_arguments(given) == (given, None)
    monkeypatch.setattr(torch.distributed.run, "get_args_parser", argparse.ArgumentParser)
    known, grace = _known_arguments(given)
    assert grace == 25
    assert known == [word for word in given if word != "--shutdown-timeout=25"]
    assert known[-1] == "--shutdown-timeout=9"
    assert _known_arguments(["--", "x.py", "--shutdown-timeout=9"]) == (["--", "x.py", "--shutdown-timeout=9"], None)


@pytest.mark.training
def test_it_is_torchrun_and_keeps_how_each_rank_ended(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    # --run is how torchrun's own --run-path may be abbreviated, were the program's options not kept from it.
    script.write_text(
        "import os, sys, time\nassert sys.argv[1:] == ['--run', 'x', '--', '-m']\n"
        "if os.environ['RANK'] == '1':\n    os._exit(42)\ntime.sleep(600)"
    )
    meet = Rendezvous(nodes=1, node_rank=0, host="127.0.0.1", port=29871, run_id="alone")
    command = torchrun_command(
        meet, processes=2, program=[str(script), "--run", "x", "--", "-m"], log_dir=str(tmp_path / "logs")
    )
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    assert "exitcode  : 42" in ended.stderr
    assert [(one.local_rank, one.exit_code) for one in read_failures(tmp_path / "logs")] == [(0, -15), (1, 42)]
