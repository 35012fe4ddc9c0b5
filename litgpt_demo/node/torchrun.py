"""torchrun: the one place where its command line is built, and what its ranks left behind is read.

Run as a module it *is* torchrun, with three differences. torchrun ends with 1 whatever happened and prints how each
rank ended as prose; here that is also written to `failures.json` in the log directory. The peers of a failed rank get
`PEER_GRACE` seconds. And where node 0's address is this machine's own loopback, its store listens there alone.

It is any torchrun from torch 2.2 on: users bring images with torch of their own. What another version lacks is made up
for in this file alone, below "other versions of torch".
"""

from __future__ import annotations

import atexit
import gc
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from litgpt_demo import PYTHON
from litgpt_demo.documents import parse_json
from litgpt_demo.errors import DataError, Fault, NetworkError, RankFailure, fault_of_exception
from litgpt_demo.node.code import enter_code
from litgpt_demo.node.printing import drop_what_does_not_fit
from litgpt_demo.secrets import is_loopback
from litgpt_demo.storage.local import NO_ROOM, write_whole

# Seconds from SIGTERM to SIGKILL for the peers of a failed rank on its node. They wait for it in a collective that can
# never end, so there is nothing that more time would save.
PEER_GRACE = 3

FAILURES = "failures.json"

_TRACEBACK_LINES = 40


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The meeting point of an attempt's nodes, and the rank of this one."""

    nodes: int
    node_rank: int
    host: str
    """Address of node 0, as every node can reach it. Never defaulted: a node that falls back to localhost forms
    a world of its own and trains alone."""
    port: int
    run_id: str
    """One per attempt: a peer left over from the last one must not be able to join (pytorch#116974)."""


def torchrun_command(
    meet: Rendezvous,
    *,
    processes: int,
    program: Sequence[str],
    log_dir: str,
    grace: int = 30,
    python: str | None = None,
) -> list[str]:
    """The argument list that starts this node's ranks.

    The rendezvous is static: ranks follow from `node_rank` alone, and no host has to recognise its own name
    (pytorch#73656). torchrun's own restarts stay off, because a gang cannot heal in part: a new attempt restarts all.

    Args:
        program: a script, or `-m` and a module, then its arguments.
        log_dir: where torchrun keeps one directory per rank with its output and error file.
        grace: seconds that ranks have between SIGTERM and SIGKILL when the node is asked to leave.
    """
    module = ("-m",) if program[0] == "-m" else ()
    return [
        *((python,) if python else PYTHON), "-m", "litgpt_demo.node.torchrun",
        f"--nnodes={meet.nodes}",
        f"--node-rank={meet.node_rank}",
        f"--nproc-per-node={processes}",
        f"--master-addr={meet.host}",
        f"--master-port={meet.port}",
        f"--rdzv-id={meet.run_id}",
        "--max-restarts=0",
        f"--shutdown-timeout={grace}",
        f"--log-dir={log_dir}",
        "--tee=3",
        "--role=rank",
        *module,
        # Without it torchrun takes the program's own options for abbreviations of its own: --run for --run-path.
        "--",
        *program[len(module):],
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """torchrun with these arguments; 1 if a rank failed, as torchrun itself.

    Where the disk is too full to write down how, it ends with the code of that class.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    known, grace = _known_arguments(sys.argv[1:] if argv is None else argv)
    arguments = parse_args(known)  # type: ignore[no-untyped-call]
    _bound_grace(grace)
    enter_code(os.environ)
    try:
        _held = _store_on_loopback(arguments.master_addr, arguments.master_port, arguments.node_rank)
        run(arguments)  # type: ignore[no-untyped-call]
    except ChildFailedError as failed:
        ended = [
            {"local_rank": one.local_rank, "exit_code": one.exitcode, "time": one.timestamp}
            for one in failed.failures.values()
        ]
        print(failed, file=sys.stderr)
        try:
            _write_failures(Path(arguments.log_dir), {"ranks": ended})
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            return Fault.DISK_FULL.exit_code
        return 1
    except Exception as error:
        _write_failures(Path(arguments.log_dir), {"agent": f"{type(error).__name__}: {error}", "time": time.time()})
        raise
    return 0


# --- other versions of torch ------------------------------------------------------------------------------------------

_SHUTDOWN_TIMEOUT = "--shutdown-timeout"


def _known_arguments(argv: Sequence[str]) -> tuple[list[str], int | None]:
    """Return torchrun's arguments as the one that is here knows them, and what it does not know: the ranks' grace.

    torch 2.13 has --shutdown-timeout (pytorch#172596); 2.11.0 and 2.2.2 have not, and give ranks 30 s.
    """
    from torch.distributed.run import get_args_parser

    own = list(argv).index("--") if "--" in argv else len(argv)
    flag = next((word for word in argv[:own] if word.startswith(f"{_SHUTDOWN_TIMEOUT}=")), None)
    if flag is None or _SHUTDOWN_TIMEOUT in get_args_parser().format_help():
        return list(argv), None
    return [word for word in argv if word is not flag], int(flag.partition("=")[2])


def _bound_grace(grace: int | None) -> None:
    """Give the peers of a failed rank `PEER_GRACE` seconds, and ranks that are asked to leave `grace`.

    From 2.2 to 2.13, torch calls `PContext.close()` with its default of 30 s for the peers, without a signal, whatever
    --shutdown-timeout says (torch/distributed/elastic/multiprocessing/api.py, SubprocessContext._poll). A torchrun
    without that flag calls it with the signal that it got, and the same default (SimpleElasticAgent._shutdown).
    Another torch is left as it is. No `grace` is where torchrun itself was told.
    """
    from torch.distributed.elastic.multiprocessing.api import PContext

    close = PContext.close
    if close.__defaults__ != (None, 30):
        return

    def bounded(self: PContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        if death_sig is None:
            timeout = PEER_GRACE
        elif grace is not None:
            timeout = grace
        close(self, death_sig, timeout)

    PContext.close = bounded  # type: ignore[method-assign]


def _store_on_loopback(host: str, port: int, node_rank: int) -> object:
    """Return node 0's store, listening on loopback alone, where that is its address; else None.

    torch's TCPStore has no address to listen on and takes all of the machine's. But it takes a socket that listens
    already, and within a process those of one port are one server as long as somebody holds it (multi_tenant), which
    torchrun's own then finds (torch/distributed/elastic/rendezvous/static_tcp_rendezvous.py, of 2.2 to 2.13). Ranks
    ask the same store. A torch whose store takes no such socket is left as it is.

    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if node_rank != 0 or not is_loopback(host):
        return None
    try:
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address, family=family)
    except OSError as error:
        raise NetworkError(
            f"{host}:{port} cannot be listened on: {error.strerror}; end what listens there, or wait"
        ) from error
    try:
        store = TCPStore(
            host, port, None, True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.fileno()
        )
    except TypeError:
        listener.close()
        return None
    listener.detach()  # it is the store's
    return store


# --- how the ranks ended ----------------------------------------------------------------------------------------------


def _write_failures(log_dir: Path, content: Mapping[str, Any]) -> None:
    log_dir.mkdir(parents=True, exist_ok=True)
    write_whole(log_dir / FAILURES, content)


def _findings(log_dir: Path) -> dict[str, Any]:
    """What torchrun wrote of its end; nothing where it was killed, or where that is damaged."""
    path = log_dir / FAILURES
    with suppress(FileNotFoundError, DataError):
        return parse_json(path.read_bytes(), dict[str, Any], where=str(path), fix="the ranks' own logs tell the rest")
    return {}


def agent_failure(log_dir: Path) -> str | None:
    """The exception that torchrun itself fell over, such as a rendezvous that timed out; `Name: message`."""
    error: str | None = _findings(log_dir).get("agent")
    return error


def rank_folders(log_dir: Path) -> Iterator[Path]:
    """`<run id>_<random>/attempt_0/<local rank>/` of the newest run; a node started again has older ones too."""
    runs = sorted(log_dir.glob("*/attempt_0"), key=lambda folder: folder.stat().st_mtime)
    return (folder for folder in (runs[-1].iterdir() if runs else ()) if folder.name.isdigit())


def read_failures(log_dir: Path) -> list[RankFailure]:
    """Return what is known of the ranks that failed under `log_dir`, by local rank.

    Exit codes are torchrun's; where it was stopped before it could tell, the error files of torch's `@record` are all.
    """
    told = {one["local_rank"]: one for one in _findings(log_dir).get("ranks", ())}
    folders = {int(folder.name): folder for folder in rank_folders(log_dir)}
    found = []
    for rank in sorted(told.keys() | folders.keys()):
        message, traceback, when = _words(folders[rank], failed=rank in told) if rank in folders else ("", [], None)
        if rank not in told and not message:
            continue
        one = told.get(rank, {"exit_code": None, "time": time.time()})
        found.append(
            RankFailure(
                local_rank=rank,
                exit_code=one["exit_code"],
                message=message,
                traceback=tuple(traceback[-_TRACEBACK_LINES:]),
                time=one["time"] if when is None else when,
                # Who was found silent may have been the one that the others waited for.
                waits=fault_of_exception(message) is Fault.HANG and not re.match(r"(?:\w+\.)*Hung:", message),
            )
        )
    return found


def _words(folder: Path, *, failed: bool) -> tuple[str, list[str], float | None]:
    """A rank's exception, its traceback, and the time of its error file (None without one).

    The file is as torch's `@record` writes it, whose writer may have been killed. Without one there is the rank's error
    output, from its last traceback on if it has one; else the words of a loader or an abort in it.
    """
    file, output = folder / "error.json", folder / "stderr.log"
    with suppress(FileNotFoundError, DataError, KeyError):
        content = parse_json(file.read_bytes(), dict[str, Any], where=str(file), fix="the rank's log tells the rest")
        if isinstance(message := content["message"], str):
            return message, [], file.stat().st_mtime
        traceback = message.get("extraInfo", {}).get("py_callstack", "")
        return message["message"], traceback.splitlines(), file.stat().st_mtime
    if not failed or not output.exists():
        return "", [], None
    with output.open("rb") as stream:
        stream.seek(max(0, output.stat().st_size - 32_768))
        text = stream.read().decode(errors="replace")
    # A rank in a process group prefixes its traceback (torch/distributed/distributed_c10d.py, _distributed_excepthook).
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in text.splitlines()]
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if starts:
        lines = lines[starts[-1] :]
        telling = [line for line in lines[1:] if line and not line.startswith(" ")]
    else:
        telling = [line.strip() for line in lines if _TELLING.search(line)]
    return "\n".join(telling)[:2000], lines, None


_TELLING = re.compile(
    r"terminate called|what\(\):|can't open file|No module named|Fatal Python error"
    r"|^(?:Syntax|Indentation|Tab)Error:"
)


if __name__ == "__main__":
    atexit.register(gc.freeze)  # as in litgpt_demo.__main__
    drop_what_does_not_fit()
    sys.exit(main())
