"""The speed of preparing a dataset: next to gigatoken alone, next to LitGPT's own way, and into a bucket.

    make bench-dataset            with QUICK=1 one round, within 4 minutes

The text is gathered from the machine (documentation, sources; each file once) and written as parquet. Every
measurement is a process of its own that imports and then takes the time; the sides take turns.

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
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from bench.common import arguments, at_least, at_most, conclude, median_ratio, peak_memory
from litgpt_demo.storage import is_remote, open_storage

# DESIGN section 6.
ALONE, LITGPT, BUCKET = 1.0, 40.0, 0.8
GROWTH = 1.1  # time per byte of the whole text over that of a quarter
MEMORY = 1.5  # GB above the interpreter

VOCABULARY = 50_257
FILES = 8

ROOTS = [Path(sys.prefix), Path(sys.base_prefix), Path("/usr"), Path("/opt")]
KINDS = {
    "", ".c", ".cc", ".cpp", ".css", ".cuh", ".go", ".h", ".hpp", ".html", ".java", ".js", ".md", ".pl", ".pm", ".pod",
    ".py", ".pyi", ".rs", ".rst", ".sh", ".tcl", ".tex", ".ts", ".txt", ".xml", ".yaml",
}  # fmt: skip
SMALLEST, LARGEST = 500, 400_000  # bytes of a document
ROWS = 1000  # of a row group, as the Hub's own conversion writes them


def gather(folder: Path, *, size: int) -> list[int]:
    """Write `size` bytes of text as FILES parquet files; returns how much each came to.

    The order is by a hash of the path, so that each file holds a sample of everything.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    found = (Path(folder, name) for root in ROOTS for folder, _, names in os.walk(root) for name in names)
    documents: dict[str, int] = {}
    gathered = 0
    for path in sorted(
        (path for path in found if path.suffix in KINDS), key=lambda path: blake2b(os.fsencode(path)).digest()
    ):
        try:
            if path.is_symlink() or not SMALLEST <= path.stat().st_size <= LARGEST:
                continue
            text = path.read_text()
        except (OSError, UnicodeDecodeError):
            continue
        if "\0" not in text and text not in documents:
            documents[text] = len(text.encode())
            gathered += documents[text]
        if gathered >= size:
            break
    texts, each = list(documents), -(-len(documents) // FILES)
    parts = [texts[number * each : (number + 1) * each] for number in range(FILES)]
    for number, part in enumerate(parts):
        table = pa.table({"text": part})
        pq.write_table(table, folder / f"{number:02d}.parquet", row_group_size=ROWS, compression="zstd")
    return [sum(documents[text] for text in part) for part in parts]


# --- the sides, each in a process of its own --------------------------------------------------------------------------


@contextmanager
def taken() -> Iterator[None]:
    """Print the seconds that the block takes, and the memory that the process came to use for it, as JSON."""
    before, began = peak_memory(), time.perf_counter()
    yield
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "bytes": peak_memory() - before}))


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


def uploaded(files: list[str], _: str, root: str) -> None:
    """The bucket's own rate: what a dataset's files take to be sent."""
    import google.cloud.storage  # noqa: F401 (before the clock runs)

    storage = open_storage(root)
    with taken():
        for file in files:
            storage.upload(Path(file), f"raw/{Path(file).name}")


SIDES = {"gigatoken": gigatoken_alone, "ours": ours, "litgpt": litgpts, "upload": uploaded}


# --- the whole --------------------------------------------------------------------------------------------------------


class Bench:
    """The place of the measurement, and what it has seen."""

    def __init__(self, folder: Path, size: int) -> None:
        import pyarrow.parquet as pq

        from litgpt_demo.config import TrainedTokenizer
        from litgpt_demo.data.tokens import train_tokenizer

        self.folder, self.seen = folder, defaultdict[str, list[dict[str, float]]](list)
        for name in ("texts", "tokenizer"):
            (folder / name).mkdir()
        self.sizes = gather(folder / "texts", size=size)
        self.files = sorted((folder / "texts").iterdir())
        settings = TrainedTokenizer(kind="train", vocab_size=VOCABULARY, sample_bytes=20_000_000)
        texts = pq.read_table(self.files[0]).column("text").to_pylist()
        for name, content in train_tokenizer(settings, texts).files.items():
            (folder / "tokenizer" / name).write_bytes(content)

    def see(self, name: str, side: str, files: Sequence[Path], target: str) -> None:
        tokenizer = str(self.folder / "tokenizer" / "tokenizer.json")
        command = [sys.executable, "-m", "bench.dataset", "--side", side, "--tokenizer", tokenizer, "--target", target]
        done = subprocess.run([*command, *map(str, files)], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{side} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        self.seen[name].append(json.loads(done.stdout.strip().splitlines()[-1]))

    def ratio(self, above: str, below: str) -> float:
        return median_ratio(*([one["seconds"] for one in self.seen[name]] for name in (above, below)))

    def fresh(self, name: str) -> str:
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return str(folder)

    def round(self, bucket: str, emulator: psutil.Process) -> None:
        quarter = self.files[: FILES // 4]
        self.see("gigatoken alone", "gigatoken", self.files, "")
        local = self.fresh("local")
        self.see("ours", "ours", self.files, local)
        [dataset] = Path(local, "datasets").iterdir()
        self.see("ours, a quarter", "ours", quarter, self.fresh("quarter"))
        before = sum(emulator.cpu_times()[:2])
        self.see("bucket", "ours", self.files, bucket)
        self.seen["bucket"][-1]["emulator_cpu_seconds"] = sum(emulator.cpu_times()[:2]) - before
        self.see("upload", "upload", sorted(dataset.glob("*.bin")), bucket)
        open_storage(bucket).remove("datasets")  # the emulator keeps everything in memory
        self.see("litgpt, a quarter", "litgpt", quarter, self.fresh("litgpt"))


@contextmanager
def bucket_emulator() -> Iterator[tuple[str, psutil.Process]]:
    """The tests' bucket emulator in a process of its own, which the sides find by their environment."""
    serve = (
        "import time\nfrom bucket_emulator import bucket_emulator\n"
        "with bucket_emulator('bench') as address:\n    print(address, flush=True)\n    time.sleep(1e6)"
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
        size, quarter = sum(bench.sizes), sum(bench.sizes[: FILES // 4])
        if size < 250e6:
            print(f"this machine has only {size / 1e6:.0f} MB of text; the bars are meant for 250 and more")
        for number in range(args.rounds):
            bench.round(f"{bucket}/{number}", emulator)
    seen = bench.seen
    rates = {
        name: size / median(one["seconds"] for one in seen[name]) / 1e6
        for name in ("gigatoken alone", "ours", "bucket")
    }
    print(", ".join(f"{name} {rate:.0f} MB/s" for name, rate in rates.items()))
    raw = bench.ratio("ours", "upload")
    # The emulator works on the cores that prepare the dataset; a bucket's own work would be elsewhere.
    share = median(one["emulator_cpu_seconds"] / (os.cpu_count() or 1) / one["seconds"] for one in seen["bucket"])
    note = f" (the emulator alone: {raw:.2f}; it took {share:.0%} of the cores)"
    growth = bench.ratio("ours", "ours, a quarter") / (size / quarter)
    memory = max(one["bytes"] for one in seen["ours"]) / 1e9
    bars = [
        at_least("preparation / gigatoken alone", bench.ratio("gigatoken alone", "ours"), ALONE),
        at_least("preparation / LitGPT's own", bench.ratio("litgpt, a quarter", "ours, a quarter"), LITGPT),
        at_least("into a bucket / into a folder", bench.ratio("ours", "bucket"), min(BUCKET, raw), note),
        at_most("time per byte, whole / quarter", growth, GROWTH),
        at_most("peak memory above the interpreter, GB", memory, MEMORY),
    ]
    return conclude("dataset", bars, {"megabytes": size / 1e6, "seen": seen, "megabytes_per_second": rates})


if __name__ == "__main__":
    sys.exit(main())
