"""torchrun, of any torch from 2.2 on because images of users have their own torch, with three differences.

- The ends of the ranks, which torchrun only prints, are also written to `failures.json` in the log directory.
- The peers of a failed rank get `PEER_GRACE` seconds.
- If node 0's address is this machine's own loopback, its store listens only there.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from litgpt_demo.errors import FailureClass, NetworkError
from litgpt_demo.imports import importing
from litgpt_demo.node.code import CODE
from litgpt_demo.node.logs import drop_lines_without_room
from litgpt_demo.secrets import is_loopback
from litgpt_demo.storage.local import NO_ROOM, atomic_write_json

# Seconds from SIGTERM to SIGKILL for the peers of a failed rank on its node. They wait for it in a collective that can
# never end, so more time would save nothing.
PEER_GRACE = 3

FAILURES = "failures.json"


# The environment variable with the seconds between SIGTERM and SIGKILL of ranks when the node has to leave. torch 2.13
# reads it (pytorch#172596). 2.11.0 and 2.2.2 have none, and give ranks 30 s.
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def main(argv: Sequence[str]) -> int:
    """Run torchrun with these arguments; return 1 if a rank failed, or a full disk's code if the report cannot be
    written."""
    with importing():
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import parse_args, run

    arguments = parse_args(list(argv))  # type: ignore[no-untyped-call]
    _bound_grace()
    # Only after all imports, because a user's module may be called `random`.
    code = os.environ.get(CODE)
    if code:
        os.chdir(code)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (code, os.environ.get("PYTHONPATH"))))
    failures = Path(arguments.log_dir) / FAILURES
    failures.parent.mkdir(parents=True, exist_ok=True)
    _share_logs(failures.parent)
    try:
        _store = _store_on_loopback(arguments.master_addr, arguments.master_port, arguments.node_rank)
        run(arguments)  # type: ignore[no-untyped-call]
    except ChildFailedError as failed:
        print(failed, file=sys.stderr)
        ranks = [
            {"local_rank": failure.local_rank, "exit_code": failure.exitcode, "time": failure.timestamp}
            for failure in failed.failures.values()
        ]
        try:
            atomic_write_json(failures, {"ranks": ranks})
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            return FailureClass.DISK_FULL.exit_code
        return 1
    except Exception as error:
        atomic_write_json(failures, {"agent": f"{type(error).__name__}: {error}", "time": time.time()})
        if isinstance(error, SignalException):  # torchrun's traceback of a normal signal has no use
            return 1
        raise
    return 0


def _share_logs(logs: Path) -> None:
    """Give torch's folder below `logs` the mode of `logs`, so that another user can follow the run. torch, from 2.2 to
    2.13, makes it by `tempfile.mkdtemp`, for its own user only."""
    make = tempfile.mkdtemp

    def make_shared(suffix: str | None = None, prefix: str | None = None, dir: str | None = None) -> str:
        folder = make(suffix, prefix, dir)
        if dir is not None and Path(dir) == logs:
            Path(folder).chmod(logs.stat().st_mode & 0o7777)
        return folder

    tempfile.mkdtemp = make_shared  # type: ignore[assignment]


def _bound_grace() -> None:
    """Shorten the 30 s of peers of a failed rank, and lengthen those of ranks that have to save.

    From 2.2 to 2.13, torch calls `PContext.close()` without a signal for the peers
    (torch/distributed/elastic/multiprocessing/api.py, SubprocessContext._poll), and with the signal at a shutdown
    (SimpleElasticAgent._shutdown), always with its default of 30 s. Another torch is not changed."""
    from torch.distributed.elastic.multiprocessing.api import PContext

    close = PContext.close
    if close.__defaults__ != (None, 30):
        return

    def bounded(self: PContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        grace = PEER_GRACE if death_sig is None else int(os.environ.get(SHUTDOWN_TIMEOUT, timeout))
        close(self, death_sig, grace)

    PContext.close = bounded  # type: ignore[method-assign]


def _store_on_loopback(host: str, port: int, node_rank: int) -> object:
    """Return node 0's store, listening only on loopback, if that is its address; else None.

    torch's TCPStore listens on all addresses of the machine, but it accepts a socket that listens already. Within a
    process the stores of one port share a server while a reference to it exists (multi_tenant), so torchrun uses this
    one (torch/distributed/elastic/rendezvous/static_tcp_rendezvous.py, of 2.2 to 2.13). Ranks use the same store. A
    torch whose store accepts no socket is not changed.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if node_rank != 0 or not is_loopback(host):
        return None
    try:
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address, family=family)
    except OSError as error:
        fix = "end the process that listens there, or wait for its end"
        raise NetworkError(f"{host}:{port} cannot be listened on: {error.strerror}", fix=fix) from error
    try:
        store = TCPStore(
            host, port, None, True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.fileno()
        )
    except TypeError:
        listener.close()
        return None
    listener.detach()  # it is the store's
    return store


if __name__ == "__main__":
    drop_lines_without_room()
    sys.exit(main(sys.argv[1:]))
