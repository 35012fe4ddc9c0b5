"""A small training that fails as it is told: what tests/faults/make.py starts in every rank.

    torchrun … failing.py --fault key-error --rank 1 --step 3

All ranks add up a number in every step, which is where the others wait for the one that fails.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader, IterableDataset

from litgpt_demo.errors import DataError, UserError
from litgpt_demo.heartbeat import Heartbeat


class Samples(IterableDataset[int]):
    """Samples whose reading hangs or fails in a worker of the loader."""

    def __init__(self, *, fails: bool) -> None:
        self._fails = fails

    def __iter__(self) -> Iterator[int]:
        if self._fails:
            raise ValueError("sample 17 has 3 fields, and the collator wants 4")
        threading.Event().wait()
        yield 0


def raising(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def signalled(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def reading(*, fails: bool) -> Callable[[], object]:
    return lambda: list(DataLoader(Samples(fails=fails), num_workers=1))


def python_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    kernel_memory()


def kernel_memory() -> None:
    """Fill this container's memory until its kernel ends the process."""
    kept = []
    while True:
        kept.append(bytearray(os.urandom(16 << 20)))


def truncated(name: str, content: bytes, read: Callable[[Path], object]) -> None:
    path = Path(f"{name}-{os.getpid()}")
    path.write_bytes(content[: len(content) // 2])
    try:
        read(path)
    finally:
        path.unlink()


def torch_file() -> bytes:
    content = io.BytesIO()
    torch.save({"weight": torch.zeros(1000)}, content)
    return content.getvalue()


def parquet(path: Path) -> object:
    from pyarrow import parquet as reader

    return reader.read_table(path)


def fill(path: str) -> None:
    with Path(path).open("wb", buffering=0) as file:
        while True:
            file.write(b"0" * 4096)


def read_from_nobody() -> None:
    path = Path(f"pipe-{os.getpid()}")
    os.mkfifo(path)
    path.read_bytes()


def compute_forever() -> None:
    while True:
        torch.ones(64, 64) @ torch.ones(64, 64)


def deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def import_missing() -> None:
    import flash_attn_4  # type: ignore[import-not-found]  # noqa: F401


def endless() -> None:
    endless()


def nan_detected() -> None:
    zeros = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: x.log(), zeros)


def world_of(ranks: int, error: type[Exception], words: str) -> None:
    if (size := dist.get_world_size()) != ranks:
        raise error(words.format(size))


FAULTS: Mapping[str, Callable[[], object]] = {
    "key-error": raising(KeyError("wte")),
    "index-error": lambda: [][3],
    "name-error": lambda: undefined_name,  # type: ignore[name-defined]  # noqa: F821
    "type-error": lambda: len(3),  # type: ignore[arg-type]
    "attribute-error": lambda: torch.no_such_function,
    "assertion": raising(AssertionError("sequence length must be a multiple of 64")),
    "value-error": raising(ValueError("learning_rate must be above 0, and is -1")),
    "zero-division": lambda: 1 // 0,
    "not-implemented": raising(NotImplementedError("packing is not implemented for this model")),
    "import": import_missing,
    "recursion": endless,
    "shape": lambda: torch.ones(3, 4) @ torch.ones(3, 4),
    "file-not-found": lambda: Path("/data/tokens-of-last-week.bin").read_bytes(),
    "permission": raising(PermissionError(13, "Permission denied", "/data/private.bin")),
    "exit-2": lambda: argparse.ArgumentParser().parse_args(["--learning-rat", "3"]),
    "user-error": raising(UserError("train.micro_batch=3 does not divide the batch; choose 2 or 4")),
    "loader-error": reading(fails=True),
    "python-memory": python_memory,
    "torch-memory": lambda: torch.empty(1 << 44, dtype=torch.uint8),
    "kernel-memory": kernel_memory,
    "kill": signalled(signal.SIGKILL),
    "segfault": signalled(signal.SIGSEGV),
    "terminate": signalled(signal.SIGTERM),
    "bus": signalled(signal.SIGBUS),
    "abort": os.abort,
    "stop": signalled(signal.SIGSTOP),
    "sleep": lambda: time.sleep(3600),
    "data": reading(fails=False),
    "pipe": read_from_nobody,
    "compute": compute_forever,
    "deadlock": deadlock,
    "data-error": raising(DataError("train-00003.bin has 1,000 bytes, and its manifest says 4,096; prepare it again")),
    "json": lambda: truncated("manifest.json", b'{"documents": 8013769}', lambda path: json.loads(path.read_text())),
    "torch-file": lambda: truncated("weights.pt", torch_file(), torch.load),
    "parquet": lambda: truncated("corpus.parquet", b"PAR1" + b"0" * 400 + b"PAR1", parquet),
    "pickle": lambda: truncated("sample.pkl", pickle.dumps([*range(1000)]), lambda path: pickle.load(path.open("rb"))),
    "unicode": lambda: truncated("text", "ü".encode() * 3, lambda path: path.read_text(encoding="utf-8")),
    "full-disk": lambda: fill("/dev/full"),
    "full-checkpoint": lambda: torch.save({"weight": torch.zeros(100_000)}, "/dev/full"),
    "nan": raising(FloatingPointError("the loss is nan at this step")),
    "nan-detected": nan_detected,
    "world": lambda: world_of(8, UserError, "this rank is one of {}, the run was submitted for 8; submit again"),
    "devices": lambda: world_of(16, ValueError, "`devices=8` and `num_nodes=2`, but the world has {} processes"),
    "none": lambda: None,
}  # fmt: skip


def fail(args: argparse.Namespace, rank: int) -> None:
    if args.rank in {rank, -1}:
        time.sleep(args.delay)
        fill(f"{args.fill}/filler-{os.getpid()}") if args.fill else FAULTS[args.fault]()


@record
def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--fill", help="fill the file system of this folder instead")
    parser.add_argument("--rank", type=int, default=0, help="the rank that fails; -1: all of them")
    parser.add_argument("--step", type=int, default=3, help="-1: before the ranks have met")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before it fails, in which the others wait")
    parser.add_argument("--silence", type=float, default=600.0, help="seconds without a sign of life that are a hang")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds that collectives wait")
    parser.add_argument("--ready", help="a file that rank 0 makes at step 2, for a fault from outside")
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    if args.step < 0:
        fail(args, rank)
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.patience))
    with Heartbeat(allow=args.silence) as heart:
        for step in range(200):
            heart.beat(step, "training")
            if step == args.step:
                fail(args, rank)
            if step == 2 and args.ready and rank == 0:
                Path(args.ready).touch()
            dist.all_reduce(torch.ones(8))
            time.sleep(0.05)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
