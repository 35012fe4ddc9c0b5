"""The bridge to datatrove, whose filters, language identification and MinHash curate the documents of a corpus.

datatrove runs in processes of its own, one for each thread that reads documents: its word tokenizers (spaCy's) cannot
be shared by threads, and its Python would hold up all of them. A process is a program of this module that answers
requests, a line of JSON each; it ends when its parent does, or when nobody has asked it anything for a while.

    {"do": "shard", "number": 3, "signatures": folder}    then batches {"texts": […]}, each answered, then {}
    {"do": "bucket", "folder": …, "bucket": 0}            pairs of near-duplicates, from the signatures of all shards
    {"do": "cluster", "folder": …}                        the documents to remove, from those pairs
    {"do": "staying", "folder": …, "number": 3, …}        the documents of a shard that stay

No word of datatrove's decisions is written again here: they are its classes', with their defaults.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import select
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import file_digest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

from pydantic import JsonValue, TypeAdapter, ValidationError

from litgpt_demo.data.settings import Curation, CurationFilter, Languages, NearDuplicates
from litgpt_demo.errors import DataError, NodeError, TrainLitgptError, Unreachable, UserError
from litgpt_demo.settings import Settings

INSTALL = "pip install 'train-litgpt[curation]' --constraint constraints.txt"

_IDLE = 60.0  # seconds without a request after which a process ends
_PER_PROCESS = 64 << 20  # bytes of signatures that are worth the seconds in which another process starts
_SAMPLES, _SAMPLE = 3, 200  # removed documents that a step shows, and characters of each
_ERRORS: dict[str, type[TrainLitgptError]] = {kind.__name__: kind for kind in (UserError, Unreachable, DataError)}


class Removed(Settings):
    """The documents and the text that one step of the curation took away."""

    step: str
    documents: int
    text_bytes: int
    """UTF-8 bytes of those documents, and of lines that were cut out of others."""
    reasons: dict[str, int]
    """The documents, by the reasons that the step gives."""
    samples: tuple[str, ...]
    """The beginnings of the first few of them."""


def total(groups: Iterable[Sequence[Removed]]) -> tuple[Removed, ...]:
    """Add up what the same steps removed from neighbouring documents."""
    return tuple(
        Removed(
            step=parts[0].step,
            documents=sum(part.documents for part in parts),
            text_bytes=sum(part.text_bytes for part in parts),
            reasons=dict(sorted(sum((Counter(part.reasons) for part in parts), Counter[str]()).items())),
            samples=tuple(sample for part in parts for sample in part.samples)[:_SAMPLES],
        )
        for parts in zip(*filter(None, groups), strict=True)  # a shard without documents has none
    )


def curation_identity(curation: Curation) -> JsonValue:
    """Return what a dataset's key takes of the curation: settings, datatrove's version, the language model's content.

    Everything that the settings name is built and tried on a sample of text.

    Raises:
        UserError: datatrove is not installed, or a step cannot work as it is set.
        Unreachable: the language model is not here and cannot be fetched.
    """
    with curator(curation) as process:
        return process.identity


def steps_of(curation: Curation) -> list[str]:
    """Return the names of the steps that judge one document at a time, in their order."""
    return (["LanguageFilter"] if curation.languages else []) + [chosen.name for chosen in curation.filters]


# --- the side that asks -----------------------------------------------------------------------------------------------


class Curator:
    """A process of datatrove."""

    def __init__(self, curation: Curation) -> None:
        """Start it and see that every step works.

        Raises:
            As `curation_identity`.
        """
        self._curation = curation
        self._process = subprocess.Popen(
            [sys.executable, "-m", "litgpt_demo.data.curation"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"LOGURU_LEVEL": "ERROR", "TQDM_DISABLE": "1"},
        )
        try:
            self.identity: JsonValue = self.ask(**curation.model_dump(mode="json"))["identity"]
        except BaseException:
            self.close()
            raise

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and return its answer.

        Raises:
            TrainLitgptError: the answer is an error, of the kind that it names.
            NodeError: the process is gone.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            _send(self._process.stdin, request)
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer.endswith(b"\n"):
            raise NodeError(
                f"the process that runs datatrove ended with code {self._process.wait()} and no word of why; -9 means "
                "that memory was short: take fewer workers"
            )
        found: dict[str, Any] = json.loads(answer)
        if "error" in found:
            raise _ERRORS[found["kind"]](found["error"])
        return found

    @property
    def answers(self) -> bool:
        """Return False if it has ended because nobody asked it anything."""
        try:
            return "identity" in self.ask(do="identity")
        except NodeError:
            return False

    @contextmanager
    def shard(self, number: int, scratch: Path) -> Iterator[CuratedShard]:
        """Curate the documents of a shard, whose batches are then given to what this returns."""
        with TemporaryDirectory(dir=scratch, prefix="signatures-") as folder:
            wanted = self._curation.near_duplicates is not None
            self.ask(do="shard", number=number, signatures=folder if wanted else None)
            yield CuratedShard(self, Path(folder))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


class CuratedShard:
    """A shard on its way through the steps."""

    def __init__(self, process: Curator, folder: Path) -> None:
        self._process, self._folder = process, folder

    def add(self, texts: Sequence[str]) -> tuple[list[bool], list[str] | None, tuple[Removed, ...]]:
        """Return which texts stay, those as they are now unless no step edits, and what each step removed."""
        answer = self._process.ask(texts=texts)
        return answer["kept"], answer["texts"], tuple(Removed.model_validate(one) for one in answer["removed"])

    def signatures(self) -> bytes:
        """Return the MinHash signatures of what stays, one bucket behind the other, after the last batch."""
        self._process.ask()
        return b"".join(path.read_bytes() for path in sorted(self._folder.glob("bucket_*/*")))


_idle: dict[tuple[int, str], list[Curator]] = {}
"""The processes that nobody uses, by the process that started them and the curation's JSON."""


@contextmanager
def curator(curation: Curation, identity: JsonValue = None) -> Iterator[Curator]:
    """A process for one thread at a time: an idle one, or a new one.

    Args:
        identity: what the process has to be, as `curation_identity` says; None for any.

    Raises:
        As `curation_identity`, and UserError if it is anything else.
    """
    _require_installed(curation)
    idle = _idle.setdefault((os.getpid(), curation.model_dump_json()), [])
    process = _taken(idle) or Curator(curation)
    if identity is not None and process.identity != identity:
        process.close()
        raise UserError(
            f"data.curation runs with {process.identity} here, and the dataset was planned with {identity}; install "
            "the same versions and give the same language model on every machine that reads documents"
        )
    try:
        yield process
    except BaseException:
        process.close()  # it may be in the middle of an answer
        raise
    idle.append(process)


def _taken(idle: list[Curator]) -> Curator | None:
    """Take the first that still answers out of the list, which other threads use too."""
    with suppress(IndexError):
        while True:
            if (process := idle.pop()).answers:
                return process
            process.close()
    return None


@atexit.register
def dismiss() -> None:
    """End the idle processes."""
    for (pid, _), idle in list(_idle.items()):
        while idle and pid == os.getpid():
            with suppress(IndexError):
                idle.pop().close()


def _require_installed(curation: Curation) -> None:
    needed = ["datatrove", "spacy", *(["fasttext", "fasteners"] if curation.languages else [])]
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise UserError(
            f"data.curation needs {' and '.join(missing)}, not installed where documents are read; run {INSTALL} "
            "there, or leave data.curation out"
        )


def near_duplicates(
    curation: Curation, numbers: Sequence[int], counts: Sequence[int], signatures: Callable[[int], bytes], scratch: Path
) -> list[list[int]]:
    """Return the documents of each shard that stay, of those that were counted.

    Needs room in `scratch` for all signatures: by default 1 kB a document; and memory for every document that has a
    near-duplicate, some hundred bytes each.

    Args:
        numbers: the shards', in their order.
        counts: the documents of each.
        signatures: returns those of a shard by its place among them.
    """
    assert curation.near_duplicates is not None
    buckets = curation.near_duplicates.num_buckets
    with TemporaryDirectory(dir=scratch, prefix="minhash-") as folder:
        size = 0
        for place, number in enumerate(numbers):
            content = signatures(place)
            size += len(content)
            part = len(content) // buckets
            for bucket in range(buckets):
                path = Path(folder, "signatures", f"bucket_{bucket:03d}", f"{number:05d}.minhash.sig")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content[bucket * part : (bucket + 1) * part])

        def paired(bucket: int) -> None:
            with curator(curation) as process:
                process.ask(do="bucket", folder=folder, bucket=bucket)

        processes = min(buckets, len(os.sched_getaffinity(0)), 1 + size // _PER_PROCESS)
        with ThreadPoolExecutor(processes) as pool:
            list(pool.map(paired, range(buckets)))
        with curator(curation) as process:
            process.ask(do="cluster", folder=folder)
            return [
                process.ask(do="staying", folder=folder, number=number, count=count)["staying"]
                for number, count in zip(numbers, counts, strict=True)
            ]


def _send(pipe: BinaryIO | Any, message: object) -> None:
    pipe.write(json.dumps(message).encode() + b"\n")
    pipe.flush()


# --- the side that answers: the only one that imports datatrove -------------------------------------------------------

# The default filters let it pass, so that each of their rules is tried: spaCy's language data, types of arguments.
_TRIAL = "\n".join(
    f"This is the {place} line of a page that people have written with care, and it tells them to be there in {month}."
    for place, month in zip(
        ["first", "second", "third", "fourth", "fifth", "sixth"],
        ["January", "March", "April", "June", "August", "winter"],
        strict=True,
    )
)


class _Server:
    """The steps of one curation, and the requests for them."""

    def __init__(self, curation: Curation, requests: BinaryIO, answers: BinaryIO) -> None:
        self._curation, self._requests, self._answers = curation, requests, answers
        self._steps = [*self._language_filter(), *(_built(chosen, curation.language) for chosen in curation.filters)]
        for name, step in zip(steps_of(curation), self._steps, strict=True):
            _tried(name, step)
        if curation.near_duplicates is not None:
            self._signature(curation.near_duplicates, "/")

    @property
    def identity(self) -> JsonValue:
        from importlib.metadata import version

        settings = self._curation.model_dump(mode="json", exclude={"languages": {"model"}})
        packages = {name: version(name) for name in ("datatrove", "spacy")}
        return {"settings": settings, **packages, **({"model": self._model} if self._curation.languages else {})}

    def serve(self) -> None:
        while select.select([self._requests], [], [], _IDLE)[0] and (request := self._next()) is not None:
            self._answer(**getattr(self, f"_{request.pop('do')}")(**request))

    def _next(self) -> dict[str, Any] | None:
        line = self._requests.readline()
        return json.loads(line) if line else None

    def _answer(self, **message: Any) -> None:
        _send(self._answers, message)

    def _identity(self) -> dict[str, Any]:
        return {"identity": self.identity}

    def _shard(self, number: int, signatures: str | None) -> dict[str, Any]:
        self._answer()
        staying = self._staying_documents()
        if signatures is None:
            for _ in staying:
                pass
        else:
            assert self._curation.near_duplicates is not None
            self._signature(self._curation.near_duplicates, signatures).run(staying, rank=number)
        return {}

    def _staying_documents(self) -> Iterator[Any]:
        from datatrove.data import Document

        while (batch := self._next()) and "texts" in batch:
            documents = [Document(text=text, id="") for text in batch["texts"]]
            kept, counts = [True] * len(documents), [_Count(name) for name in steps_of(self._curation)]
            for number, document in enumerate(documents):
                kept[number] = all(count.judge(step, document) for step, count in zip(self._steps, counts, strict=True))
            staying = [document for document, stays in zip(documents, kept, strict=True) if stays]
            texts = [document.text for document in staying] if self._curation.edits else None
            self._answer(kept=kept, texts=texts, removed=[count.removed().model_dump() for count in counts])
            yield from staying

    def _bucket(self, folder: str, bucket: int) -> dict[str, Any]:
        from datatrove.pipeline.dedup import MinhashDedupBuckets

        config = self._config(self._curation.near_duplicates)
        step = MinhashDedupBuckets(f"{folder}/signatures", f"{folder}/pairs", config=config)
        step.run(rank=bucket, world_size=config.num_buckets)
        return {}

    def _cluster(self, folder: str) -> dict[str, Any]:
        from datatrove.pipeline.dedup import MinhashDedupCluster

        config = self._config(self._curation.near_duplicates)
        MinhashDedupCluster(f"{folder}/pairs", f"{folder}/removed", config=config).run()
        return {}

    def _staying(self, folder: str, number: int, count: int) -> dict[str, Any]:
        from datatrove.data import Document
        from datatrove.pipeline.dedup import MinhashDedupFilter

        documents = (Document(text="", id=str(place)) for place in range(count))
        staying = MinhashDedupFilter(f"{folder}/removed").run(documents, rank=number)
        return {"staying": [int(document.id) for document in staying]}

    def _config(self, settings: NearDuplicates | None) -> Any:
        from datatrove.pipeline.dedup.minhash import MinhashConfig
        from datatrove.utils.hashing import HashConfig

        assert settings is not None
        # Not its default, xxhash: datatrove 0.8 gives it strings, which xxhash 4 refuses.
        return MinhashConfig(hash_config=HashConfig(hash_fc="sha1"), **settings.model_dump())

    def _signature(self, settings: NearDuplicates, folder: str) -> Any:
        from datatrove.pipeline.dedup import MinhashDedupSignature

        language = self._curation.language
        try:
            step = MinhashDedupSignature(folder, self._config(settings), language)
            step.get_signature(step.get_shingles(_TRIAL))
        except Exception as error:
            raise UserError(
                f"data.curation.near_duplicates with data.curation.language={language!r} cannot work: {_said(error)}"
            ) from error
        return step

    def _language_filter(self) -> Iterator[Any]:
        if (languages := self._curation.languages) is None:
            return
        from datatrove.pipeline.filters import LanguageFilter
        from datatrove.utils.lid import FastTextLID
        from fasttext.FastText import _FastText

        file = _model_file(languages)
        try:
            fasttext, self._model = _FastText(str(file)), _hash(file)
        except (ValueError, OSError) as error:
            raise UserError(
                f"data.curation.languages.model: {file} is no model of fasttext ({error}); give a .bin or .ftz file"
            ) from error
        if unknown := sorted(
            set(languages.keep) - {label.removeprefix("__label__") for label in fasttext.get_labels()}
        ):
            raise UserError(
                f"data.curation.languages.keep has {', '.join(unknown)}, which {languages.model} does not know; it has "
                f"{', '.join(sorted(label.removeprefix('__label__') for label in fasttext.get_labels())[:20])}"
            )

        class Identifier(FastTextLID):  # type: ignore[misc]
            model = fasttext

        step = LanguageFilter(list(languages.keep), language_threshold=languages.threshold)
        step.model = Identifier(list(languages.keep))
        yield step


class _Count:
    """The documents that one step removed from a batch."""

    def __init__(self, step: str) -> None:
        self._step, self._reasons, self._samples = step, Counter[str](), list[str]()
        self._documents = self._text_bytes = 0

    def judge(self, step: Any, document: Any) -> bool:
        """Return whether the document stays."""
        from datatrove.pipeline.filters.base_filter import get_filter_result

        before = document.text
        try:
            stays, reason = get_filter_result(step.filter(document))
        except Exception as error:
            raise DataError(
                f"data.curation: {self._step} fails on the document that begins {before[:60]!r}: {_said(error)}; "
                "leave the filter out, or the document"
            ) from error
        if stays and document.text:
            if document.text != before:
                self._text_bytes += len(before.encode()) - len(document.text.encode())
            return True
        self._documents += 1
        self._text_bytes += len(before.encode())
        self._reasons[reason or ("nothing left" if stays else "removed")] += 1
        if len(self._samples) < _SAMPLES:
            self._samples.append(before[:_SAMPLE])
        return False

    def removed(self) -> Removed:
        return Removed(
            step=self._step,
            documents=self._documents,
            text_bytes=self._text_bytes,
            reasons=dict(self._reasons),
            samples=tuple(self._samples),
        )


def _built(chosen: CurationFilter, language: str) -> Any:
    """Make the filter, whose arguments are compared with the signature of its class.

    Raises:
        UserError: there is no such argument, one has a value of another type, or one is missing.
    """
    from inspect import signature

    from datatrove.pipeline import filters

    kind, where = getattr(filters, chosen.name), f"data.curation.filters: {chosen.name}"
    known = dict(signature(kind).parameters)
    del known["exclusion_writer"]
    if unknown := sorted(set(chosen.arguments) - set(known)):
        raise UserError(f"{where} has no argument {', '.join(unknown)}; it has {', '.join(known) or 'none'}")
    given = {name: _value(f"{where}.{name}", known[name], value) for name, value in chosen.arguments.items()}
    try:
        return kind(**({"language": language} if "language" in known else {}) | given)
    except Exception as error:
        raise UserError(f"{where} cannot be made with {chosen.arguments}: {_said(error)}") from error


def _value(where: str, parameter: Any, value: JsonValue) -> Any:
    """Return a value of the type that the parameter declares; tuples are tried instead, many are declared wrong."""
    if "tuple" in str(parameter.annotation):
        return _tuples(value)
    try:
        return TypeAdapter(parameter.annotation).validate_python(value)
    except ValidationError as error:
        wanted = getattr(parameter.annotation, "__name__", None) or str(parameter.annotation)
        raise UserError(f"{where}: {value!r} given, and it takes {wanted}: {error.errors()[0]['msg']}") from error


def _tuples(value: JsonValue) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _tried(name: str, step: Any) -> None:
    from datatrove.data import Document

    try:
        step.filter(Document(text=_TRIAL, id=""))
    except Exception as error:
        raise UserError(f"data.curation: {name} cannot work as it is set: {_said(error)}") from error


def _model_file(languages: Languages) -> Path:
    """The fasttext model on this machine; a known one is downloaded by datatrove if it was not before.

    Raises:
        UserError: there is no file at the path.
        Unreachable: the known one cannot be fetched.
    """
    from datatrove.io import cached_asset_path_or_download
    from datatrove.utils.lid import FT176LID, GlotLID

    known = {"ft176": FT176LID, "glotlid": GlotLID}
    if languages.model not in known:
        if not (path := Path(languages.model).expanduser()).is_file():
            raise UserError(
                f"data.curation.languages.model={languages.model!r} is neither a file on this machine nor one of "
                f"{', '.join(known)}"
            )
        return path
    model = known[languages.model]()
    try:
        return Path(
            cached_asset_path_or_download(
                model.MODEL_URL, progress=False, namespace="lid", subfolder=model.MODEL_SUBFOLDER
            )
        )
    except Exception as error:
        raise Unreachable(
            f"data.curation.languages.model={languages.model}: {model.MODEL_URL} cannot be fetched ({_said(error)}); "
            "fetch it where there is a network, and give its path on this machine instead"
        ) from error


def _hash(file: Path) -> str:
    with file.open("rb") as content:
        return f"sha256:{file_digest(content, 'sha256').hexdigest()}"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def main() -> int:
    """Answer requests on the standard input until it ends."""
    # thinc, which spaCy is made of, would import torch and never use it here: seconds, and hundreds of megabytes.
    sys.modules["torch"] = None  # type: ignore[assignment]
    # What libraries print goes to the standard error; answers alone go to the standard output.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = sys.stdin.buffer
    try:
        server = _Server(Curation.model_validate_json(requests.readline()), requests, answers)
        _send(answers, {"identity": server.identity})
        server.serve()
    except TrainLitgptError as error:
        _send(answers, {"error": str(error), "kind": type(error).__name__})
    return 0


if __name__ == "__main__":
    sys.exit(main())
