"""The speed of preparing a dataset: next to gigatoken alone, next to LitGPT's own way, and into a bucket.

    make bench-dataset            with QUICK=1 one round, within 4 minutes

The text is gathered from the machine (documentation, sources; each file once) and written as parquet. Every
measurement is a process of its own that imports and then takes the time; the sides take turns. Figures, spread and
machine go to bench/results/dataset-<machine>.json; the exit code is 1 if a bar is missed.

LitGPT's way is `litgpt.data.OpenWebText.prepare_data` (0.5.13): its tokenizer on one document per call, through
`litdata.optimize` with as many workers as that code takes, here on a quarter of the text that is in memory already.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from bench.figures import Bar, arguments, conclude
from bench.texts import gather
from litgpt_demo.storage import is_remote, open_storage

# DESIGN section 6.
ALONE, LITGPT, BUCKET = 1.0, 40.0, 0.8
GROWTH = 1.1  # time per byte of the whole text over that of a quarter
MEMORY = 1.5e9  # bytes above the interpreter

VOCABULARY = 50_257
FILES = 8


# --- the sides, each in a process of its own --------------------------------------------------------------------------


def gigatoken_alone(files: list[str], tokenizer: str, _: str) -> None:
    from gigatoken import ParquetFileSource, Tokenizer

    with taken():
        encoder = Tokenizer.from_json(Path(tokenizer).read_text())
        encoder.encode_files(ParquetFileSource(files))


def ours(files: list[str], tokenizer: str, root: str) -> None:
    import awkward  # noqa: F401 (what the work imports, before the clock runs)
    import gigatoken  # noqa: F401
    import pyarrow.parquet  # noqa: F401

    if is_remote(root):
        import google.cloud.storage  # noqa: F401

    from litgpt_demo.config import DataConfig
    from litgpt_demo.data.dataset import plan_dataset
    from litgpt_demo.data.preparation import prepare

    corpus, settings = {"kind": "files", "paths": files}, {"kind": "file", "path": tokenizer}
    with taken():
        planned = plan_dataset(DataConfig.model_validate({"corpus": corpus, "tokenizer": settings}))
        prepare(planned, open_storage(root))


def litgpts(files: list[str], tokenizer: str, folder: str) -> None:
    import pyarrow.parquet as pq
    from litdata import optimize

    texts = [text for file in files for text in pq.read_table(file).column("text").to_pylist()]
    # litdata sends the function to its workers; a file that they read is what LitGPT's own dataset is.
    table = Path(folder, "texts.json")
    table.write_text(json.dumps(texts))
    workers = max(1, min(64, (os.cpu_count() or 2) - 1))
    with taken():
        optimize(
            fn=_Tokenize(table, tokenizer),
            inputs=list(range(len(texts))),
            output_dir=str(Path(folder, "litdata")),
            num_workers=workers,
            chunk_bytes="200MB",
        )


class _Tokenize:
    """Encode a document as LitGPT does: its own tokenizer, one call."""

    def __init__(self, texts: Path, tokenizer: str) -> None:
        self.texts, self.tokenizer = texts, tokenizer
        self.loaded: tuple[list[str], Any] | None = None

    def __call__(self, index: int) -> Iterator[Any]:
        if self.loaded is None:
            from litgpt.tokenizer import Tokenizer

            self.loaded = json.loads(self.texts.read_text()), Tokenizer(Path(self.tokenizer).parent)
        texts, tokenizer = self.loaded
        yield tokenizer.encode(texts[index], eos=True)


def verified(_: list[str], __: str, address: str) -> None:
    from litgpt_demo.data.verification import verify_dataset

    with taken():
        problems = verify_dataset(address).problems
    assert not problems, problems


def uploaded(files: list[str], _: str, root: str) -> None:
    """The bucket's own rate: what a dataset's files take to be sent."""
    import google.cloud.storage  # noqa: F401 (before the clock runs)

    storage = open_storage(root)
    with taken():
        for file in files:
            storage.upload(Path(file), f"raw/{Path(file).name}")


SIDES: dict[str, Callable[[list[str], str, str], None]] = {
    "gigatoken": gigatoken_alone, "ours": ours, "litgpt": litgpts, "verify": verified, "upload": uploaded,
}  # fmt: skip


@contextmanager
def taken() -> Iterator[None]:
    """Print the seconds that the block takes, and the memory that the process came to use for it, as JSON."""
    before, began = _peak(), time.perf_counter()
    yield
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "bytes": _peak() - before}))


def _peak() -> int:
    """Bytes; not getrusage's, which begins with the peak of the process that started this one."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024


def measured(side: str, files: Sequence[Path], tokenizer: Path, target: str) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.dataset", "--side", side, "--tokenizer", str(tokenizer), "--target", target]
    done = subprocess.run([*command, *map(str, files)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


# --- the whole --------------------------------------------------------------------------------------------------------


class Bench:
    """The place of the measurement, and what it has seen."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        self.texts = folder / "texts"
        self.texts.mkdir()
        self.size = gather(self.texts, size=size, files=FILES)
        self.files = sorted(self.texts.iterdir())
        self.tokenizer = self._tokenizer()
        self.seen: dict[str, list[dict[str, float]]] = {}

    def _tokenizer(self) -> Path:
        import pyarrow.parquet as pq

        from litgpt_demo.config import TrainedTokenizer
        from litgpt_demo.data.tokens import train_tokenizer

        texts = pq.read_table(self.files[0]).column("text").to_pylist()
        settings = TrainedTokenizer(kind="train", vocab_size=VOCABULARY, sample_bytes=20_000_000)
        folder = self.folder / "tokenizer"
        folder.mkdir()
        for name, content in train_tokenizer(settings, texts).files.items():
            (folder / name).write_bytes(content)
        return folder / "tokenizer.json"

    def see(self, name: str, side: str, files: Sequence[Path], target: str) -> None:
        self.seen.setdefault(name, []).append(measured(side, files, self.tokenizer, target))

    def seconds(self, name: str) -> float:
        return median(one["seconds"] for one in self.seen[name])

    def ratio(self, above: str, below: str) -> float:
        """Median over the rounds of the one's seconds over the other's."""
        pairs = zip(self.seen[above], self.seen[below], strict=True)
        return median(one["seconds"] / other["seconds"] for one, other in pairs)

    def fresh(self, name: str) -> str:
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return str(folder)


def rounds_of(bench: Bench, rounds: int, bucket: str, emulator: psutil.Process) -> None:
    quarter = bench.files[: FILES // 4]
    for number in range(rounds):
        bench.see("gigatoken alone", "gigatoken", bench.files, "")
        local = bench.fresh("local")
        bench.see("ours", "ours", bench.files, local)
        [dataset] = Path(local, "datasets").iterdir()
        bench.see("verify", "verify", [], str(dataset))
        bench.see("ours, a quarter", "ours", quarter, bench.fresh("quarter"))
        before = sum(emulator.cpu_times()[:2])
        bench.see("bucket", "ours", bench.files, f"{bucket}/{number}")
        bench.seen["bucket"][-1]["emulator_cpu_seconds"] = sum(emulator.cpu_times()[:2]) - before
        bench.see("upload", "upload", sorted(dataset.glob("*.bin")), f"{bucket}/{number}")
        open_storage(f"{bucket}/{number}").remove("datasets")  # the emulator keeps everything in memory
        bench.see("litgpt, a quarter", "litgpt", quarter, bench.fresh("litgpt"))


def bars(bench: Bench) -> Iterator[Bar]:
    alone = bench.ratio("gigatoken alone", "ours")
    yield Bar("preparation / gigatoken alone", alone, f"{ALONE}", alone >= ALONE)
    litgpt = bench.ratio("litgpt, a quarter", "ours, a quarter")
    yield Bar("preparation / LitGPT's own", litgpt, f"{LITGPT}", litgpt >= LITGPT)
    bucket, raw = bench.ratio("ours", "bucket"), bench.ratio("ours", "upload")
    asked = min(BUCKET, raw)
    # The emulator works on the cores that prepare the dataset; a bucket's own work would be elsewhere.
    share = median(one["emulator_cpu_seconds"] / (os.cpu_count() or 1) / one["seconds"] for one in bench.seen["bucket"])
    told = f"{asked:.2f} (the emulator alone: {raw:.2f}; it took {share:.0%} of the cores)"
    yield Bar("into a bucket / into a folder", bucket, told, bucket >= asked)
    growth = bench.ratio("ours", "ours, a quarter") / (bench.size / quarter_size(bench))
    yield Bar("time per byte, whole / quarter", growth, f"at most {GROWTH}", growth <= GROWTH)
    memory = max(one["bytes"] for one in bench.seen["ours"])
    yield Bar("peak memory above the interpreter, GB", memory / 1e9, f"at most {MEMORY / 1e9}", memory <= MEMORY)


def quarter_size(bench: Bench) -> int:
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    columns = (pq.read_table(file).column("text") for file in bench.files[: FILES // 4])
    return sum(pc.sum(pc.binary_length(column)).as_py() for column in columns)


def main() -> int:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--megabytes", type=float, default=300, help="of text")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--tokenizer", help=argparse.SUPPRESS)
    parser.add_argument("--target", help=argparse.SUPPRESS)
    parser.add_argument("files", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        SIDES[args.side](args.files, args.tokenizer, args.target)
        return 0
    with tempfile.TemporaryDirectory(prefix="bench-dataset-") as folder, bucket_emulator() as (bucket, emulator):
        bench = Bench(Path(folder), int(args.megabytes * 1e6))
        if bench.size < 250e6:
            print(f"this machine has only {bench.size / 1e6:.0f} MB of text; the bars are meant for 250 and more")
        rounds_of(bench, args.rounds, bucket, emulator)
        found = list(bars(bench))
        rates = {name: bench.size / bench.seconds(name) / 1e6 for name in ("gigatoken alone", "ours", "bucket")}
    print(", ".join(f"{name} {rate:.0f} MB/s" for name, rate in rates.items()))
    seen = {"megabytes": bench.size / 1e6, "seen": bench.seen, "megabytes_per_second": rates}
    return conclude("dataset", found, seen)


@contextmanager
def bucket_emulator() -> Iterator[tuple[str, psutil.Process]]:
    """The tests' bucket emulator in a process of its own, which the sides find by their environment."""
    serve = "\n".join(
        [
            "import time",
            "from bucket_emulator import bucket_emulator",
            "with bucket_emulator('bench') as address:",
            "    print(address, flush=True)",
            "    time.sleep(1e6)",
        ]
    )
    environment = os.environ | {"PYTHONPATH": "tests/fakes"}
    emulator = subprocess.Popen([sys.executable, "-c", serve], env=environment, stdout=subprocess.PIPE, text=True)
    assert emulator.stdout is not None
    os.environ["STORAGE_EMULATOR_HOST"] = emulator.stdout.readline().strip()
    try:
        yield "gs://bench/root", psutil.Process(emulator.pid)
    finally:
        emulator.kill()
        emulator.wait()


if __name__ == "__main__":
    sys.exit(main())
