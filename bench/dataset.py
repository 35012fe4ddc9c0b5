"""The speed of preparing a dataset: next to gigatoken alone, next to LitGPT's own way, and into a bucket.

The text is gathered from the machine (documentation, sources; each file once) and written as parquet. Every
measurement is a process of its own that imports and then takes the time; the sides take turns. It is none of
`multiprocessing`, in which gigatoken would use one core. LitGPT's way is
`litgpt.data.OpenWebText.prepare_data` (0.5.13): its tokenizer on one document per call, through `litdata.optimize` with
as many workers as that code takes, here on a quarter of the text.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from statistics import median
from typing import Any

from litgpt_demo.storage import open_storage

SIZE, FILES = 300_000_000, 8  # bytes of text, and what they are written to
KINDS = ".c .cc .cpp .css .cuh .go .h .hpp .html .java .js .md .pl .pm .pod .py .pyi .rs .rst .sh .tcl .tex .txt .xml"

Taken = dict[str, float]


def gather(folder: Path) -> list[int]:
    """Write SIZE bytes of text as FILES parquet files; returns how much each came to. Each has some of everything."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    roots = (sys.prefix, sys.base_prefix, "/usr", "/opt")
    found = (Path(folder, name) for root in roots for folder, _, names in os.walk(root) for name in names)
    kinds = (path for path in found if path.suffix in {"", *KINDS.split()} and not path.is_symlink())
    documents: dict[str, int] = {}
    gathered = 0
    for path in sorted(kinds, key=lambda path: blake2b(os.fsencode(path)).digest()):
        text = ""
        with suppress(OSError, UnicodeDecodeError):
            text = path.read_text() if 500 <= path.stat().st_size <= 400_000 else ""
        if text and "\0" not in text and text not in documents:
            documents[text] = len(text.encode())
            gathered += documents[text]
        if gathered >= SIZE:
            break
    parts = [[*documents][number::FILES] for number in range(FILES)]
    for number, part in enumerate(parts):
        file = folder / f"{number:02d}.parquet"  # with groups of rows as the Hub's own conversion writes them
        pq.write_table(pa.table({"text": part}), file, row_group_size=1000, compression="zstd")
    return [sum(documents[text] for text in part) for part in parts]


def taken(work: Callable[[], object]) -> Taken:
    """The seconds that the work takes, and the bytes of memory that the process came to use for it."""
    import awkward  # noqa: F401 (what the sides import, before the clock runs)
    import gigatoken  # noqa: F401
    import google.cloud.storage  # noqa: F401
    import pyarrow.parquet  # noqa: F401

    def peak() -> int:  # not getrusage's, which begins with that of the process that started this one
        return 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])

    before, began = peak(), time.perf_counter()
    work()
    return {"seconds": time.perf_counter() - began, "bytes": peak() - before}


def gigatoken_alone(files: Sequence[str], tokenizer: str, _: str) -> Taken:
    from gigatoken import ParquetFileSource, Tokenizer

    return taken(lambda: Tokenizer.from_json(Path(tokenizer).read_text()).encode_files(ParquetFileSource(files)))


def ours(files: Sequence[str], tokenizer: str, root: str) -> Taken:
    from litgpt_demo.config import DataConfig
    from litgpt_demo.data.dataset import plan_dataset
    from litgpt_demo.data.preparation import prepare

    corpus, settings = {"kind": "files", "paths": files}, {"kind": "file", "path": tokenizer}
    data = DataConfig.model_validate({"corpus": corpus, "tokenizer": settings})
    return taken(lambda: prepare(plan_dataset(data), open_storage(root)))


def litgpts(files: Sequence[str], tokenizer: str, folder: str) -> Taken:
    import pyarrow.parquet as pq
    from litdata import optimize

    # litdata sends the function to its workers; a file that they read is what LitGPT's own dataset is.
    table, texts = Path(folder, "texts.json"), pq.read_table(files)["text"].to_pylist()
    table.write_text(json.dumps(texts))
    options = {"inputs": list(range(len(texts))), "output_dir": f"{folder}/litdata", "chunk_bytes": "200MB"}
    workers = max(1, min(64, (os.cpu_count() or 2) - 1))
    return taken(lambda: optimize(fn=partial(tokens, table, tokenizer), num_workers=workers, **options))


def tokens(table: Path, tokenizer: str, index: int) -> Any:
    """Encode a document as LitGPT does: its own tokenizer, one call."""
    texts, encoder = loaded(table, tokenizer)
    yield encoder.encode(texts[index], eos=True)


@cache
def loaded(table: Path, tokenizer: str) -> Any:
    from litgpt.tokenizer import Tokenizer

    return json.loads(table.read_text()), Tokenizer(Path(tokenizer).parent)


def uploaded(files: Sequence[str], _: str, root: str) -> Taken:
    """The bucket's own rate: what a dataset's files take to be sent."""
    storage = open_storage(root)
    return taken(lambda: [storage.upload(Path(file), f"raw/{Path(file).name}") for file in files])


def measure(rounds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    import pyarrow.parquet as pq

    from litgpt_demo.config import TrainedTokenizer
    from litgpt_demo.data.tokens import train_tokenizer

    sys.path.insert(0, "tests/fakes")
    from bucket_emulator import bucket_emulator

    seen = defaultdict[str, list[Taken]](list)
    with tempfile.TemporaryDirectory(prefix="bench-dataset-") as name, bucket_emulator("bench") as address:
        os.environ["STORAGE_EMULATOR_HOST"] = address  # where the sides find it
        texts, tokenizer = Path(name, "texts"), Path(name, "tokenizer", "tokenizer.json")
        texts.mkdir()
        tokenizer.parent.mkdir()
        sizes = gather(texts)
        size, quarter = sum(sizes), sum(sizes[: FILES // 4])
        print(f"{size / 1e6:.0f} MB of text; the bars are meant for 250 and more")
        files = sorted(str(path) for path in texts.iterdir())
        settings = TrainedTokenizer(kind="train", vocab_size=50_257, sample_bytes=20_000_000)
        sample = pq.read_table(files[0])["text"].to_pylist()
        for file, content in train_tokenizer(settings, sample).files.items():
            (tokenizer.parent / file).write_bytes(content)

        def see(what: str, side: Callable[..., Taken], files: Sequence[str], target: str) -> None:
            arguments = json.dumps([side.__name__, files, str(tokenizer), target])
            command = [sys.executable, "-m", "bench.dataset", arguments]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            seen[what].append(json.loads(output.splitlines()[-1]))

        for number in range(rounds):
            bucket = f"gs://bench/{number}"
            with tempfile.TemporaryDirectory(dir=name) as root, tempfile.TemporaryDirectory(dir=name) as part:
                see("gigatoken alone", gigatoken_alone, files, "")
                see("ours", ours, files, root)
                see("ours, a quarter", ours, files[: FILES // 4], part)
                see("bucket", ours, files, bucket)
                see("upload", uploaded, [str(path) for path in Path(root).glob("datasets/*/*.bin")], bucket)
                open_storage(bucket).remove("datasets")  # the emulator keeps everything in memory
                if not number:  # a minute
                    see("litgpt, a quarter", litgpts, files[: FILES // 4], part)

    def ratio(above: str, below: str) -> float:
        return median(high["seconds"] / low["seconds"] for high, low in zip(seen[above], seen[below], strict=True))

    # The emulator works on the cores that prepare the dataset; a bucket's own work would be elsewhere.
    quarters, (litgpt,) = seen["ours, a quarter"], [taken["seconds"] for taken in seen["litgpt, a quarter"]]
    into, raw = ratio("ours", "bucket"), ratio("ours", "upload")
    bars: dict[str, Any] = {  # DESIGN section 6
        "preparation / gigatoken alone": (ratio("gigatoken alone", "ours"), "at least", 1.0),
        "preparation / LitGPT's own": (litgpt / median(taken["seconds"] for taken in quarters), "at least", 40.0),
        f"into a bucket / into a folder (the emulator alone: {raw:.2f})": (into, "at least", min(0.8, raw)),
        "time per byte, whole / quarter": (ratio("ours", "ours, a quarter") * quarter / size, "at most", 1.1),
        "peak memory above the interpreter, GB": (max(taken["bytes"] for taken in seen["ours"]) / 1e9, "at most", 0.6),
    }
    bars["ours, MB/s"] = (size / median(taken["seconds"] for taken in seen["ours"]) / 1e6,)
    return bars, {"megabytes": size / 1e6, "seen": seen}


def main() -> None:
    """Carry out one side, and print what it took."""
    name, *arguments = json.loads(sys.argv[1])
    sides = {side.__name__: side for side in (gigatoken_alone, ours, litgpts, uploaded)}
    print(json.dumps(sides[name](*arguments)))


if __name__ == "__main__":
    main()
