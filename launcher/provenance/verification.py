"""Verification of a run, or of a copy of its model: every digest that is recorded, computed again.

Everything that is read may have been written by others. A difference is a problem that names the file. Parts that
cannot be checked from here are listed apart, and never count as verified.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import unquote, urlsplit

from launcher.provenance.dependencies import attempt_numbers, datasets_of, descriptor
from launcher.provenance.metadata import CROISSANT, MODEL_BILL
from launcher.provenance.signing import (
    ATTESTATIONS,
    MODEL_SIGNATURE,
    UNLISTED,
    BadSignature,
    verified_digests,
    verified_statements,
)
from launcher.provenance.statements import (
    PAGE,
    PROVENANCE,
    PROVENANCE_TYPE,
    STATEMENT_TYPE,
    TEST_RESULT,
    TEST_RESULT_TYPE,
    provenance_of,
    test_result_of,
)
from launcher.runs.run import RunManifest
from litgpt_demo import PYTHON
from litgpt_demo.config import TrainingSpec
from litgpt_demo.data.dataset import verify_dataset
from litgpt_demo.documents import MOST_BYTES, FileRecord, parse_json, read_manifest
from litgpt_demo.errors import DataError, TrainLitgptError, fault_of_exit_code
from litgpt_demo.export import FinalManifest
from litgpt_demo.export.digests import RecomputedDigests
from litgpt_demo.metrics import Row, damaged_lines
from litgpt_demo.runs import ATTEMPTS, CONFIG, FINAL, FINAL_AVERAGE, METRICS, read_metrics, read_spec
from litgpt_demo.storage import MANIFEST, Storage, open_storage, sha256_of
from litgpt_demo.storage.private import environment_of_readers
from litgpt_demo.training.chain import NO_LINK, Chain, Link
from litgpt_demo.training.checkpoints import folder_of, list_complete

if TYPE_CHECKING:
    from securesystemslib.signer import SSlibKey

Recompute: TypeAlias = Callable[[Sequence[str]], RecomputedDigests]
"""Runs `python -m litgpt_demo digests` with these arguments."""

VERIFIER = f"{PAGE}#verifier-v1"
_SVR_TYPE = "https://in-toto.io/attestation/svr/v0.2"
_WEIGHTS_STATED = "predicate.runDetails.byproducts[chain].annotations.weights_sha256"
_KIND = "predicateType"
_BYPRODUCTS = "predicate.runDetails.byproducts"
_DEPENDENCIES = "predicate.buildDefinition.resolvedDependencies"
_RESOURCE = re.compile(r"predicate\.(?:buildDefinition\.resolvedDependencies|configuration)(\[[^\]]*\])")
_TRAINING = "predicate.buildDefinition.externalParameters.training"
_WRITER = "predicate.runDetails.builder.version"  # a later release may verify
_MOST_SHOWN = 20  # problems in one error
_AT_ONCE = 4  # files that are read in parallel


@dataclass
class Check:
    """Digests of one kind, and those that are not as recorded."""

    name: str
    """A property of a verification result, such as MODEL_FILES."""
    what: str
    count: int = 0
    """The number of items that were compared."""
    problems: list[str] = field(default_factory=list)

    def add(self, problem: str | None = None) -> None:
        """Count an item, which has a problem or not."""
        self.count += 1
        if problem:
            self.problems.append(problem)

    def compare(self, what: str, found: Any, expected: Any, *, source: str = "it should be") -> None:
        """Count an item, which has a problem unless both values are equal."""
        self.add(_difference(what, found, expected, source))

    def records(self, storage: Storage, records: Sequence[FileRecord], prefix: str) -> None:
        """Read files, and compare each with its record."""

        def read(record: FileRecord) -> str | None:
            shown = f"{prefix}{record.path}"
            try:
                if record.sha256 is None:
                    return _difference(f"{shown}: its crc32c", storage.stat(record.path).crc32c, record.crc32c)
                return _difference(f"{shown}: its sha256", _sha256_at(storage, record.path), record.sha256)
            except FileNotFoundError:
                return f"{shown} is missing"
            except TrainLitgptError as error:  # such as a path that leaves the folder
                return f"{shown}: {error.what}"

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for problem in pool.map(read, records):
                self.add(problem)

    def strays(self, storage: Storage, records: Iterable[FileRecord], prefix: str) -> None:
        """Make a problem of each file that no manifest lists."""
        strays = {*storage.list()} - {record.path for record in records} - {MANIFEST, *UNLISTED}
        self.problems += [f"{prefix}{path} is not in its manifest" for path in sorted(strays)]

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Make a problem of an error about stored data."""
        try:
            yield
        except TrainLitgptError as error:
            self.add(error.what)
        except FileNotFoundError as error:
            self.add(f"{error.filename} is missing")


@dataclass
class Verification:
    address: str
    checks: list[Check] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    """A sentence for each part that could not be checked."""
    subjects: dict[str, str] = field(default_factory=dict)
    """The SHA-256 of each file of the model."""

    def begin(self, name: str, what: str) -> Check:
        self.checks.append(Check(name, what))
        return self.checks[-1]

    @property
    def problems(self) -> list[str]:
        return [problem for check in self.checks for problem in check.problems]

    def statement(self) -> dict[str, Any]:
        """Return the result as an in-toto statement, with the properties that hold
        (https://github.com/in-toto/attestation, spec/predicates/svr.md)."""
        failed = {check.name for check in self.checks if check.problems}
        held = dict.fromkeys(check.name for check in self.checks if check.count and check.name not in failed)
        predicate = {
            "verifier": {"id": VERIFIER, "policies": []},
            "timeCreated": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
            "properties": [f"TRAIN_LITGPT_{name}" for name in held],
        }
        subject = [descriptor(path, digest={"sha256": digest}) for path, digest in self.subjects.items()]
        return {"_type": STATEMENT_TYPE, "subject": subject, "predicateType": _SVR_TYPE, "predicate": predicate}


def recompute_in_a_child(arguments: Sequence[str]) -> RecomputedDigests:
    """Return digests that another process computes, because torch stays out of this one."""
    with tempfile.TemporaryDirectory(prefix="train-litgpt-verify-") as folder:
        out = Path(folder, "digests.json")
        command = [*PYTHON, "-m", "litgpt_demo", "digests", *arguments, "--out", str(out)]
        environ = environment_of_readers(os.environ)
        done = subprocess.run(command, env=environ, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
            what = f"the digests of the weights could not be computed: {last}"
            raise TrainLitgptError(what, fault=fault_of_exit_code(done.returncode))
        return parse_json(out.read_bytes(), RecomputedDigests, where=str(out), fix="verify again")


def is_run(place: Storage) -> bool:
    return place.exists(CONFIG) or place.exists(f"{FINAL}/{MANIFEST}")


def is_model(place: Storage) -> bool:
    """Return whether a folder is a copy of a run's `final`."""
    return any(place.exists(path) for path in (PROVENANCE, ATTESTATIONS, "lineage.json"))


def verify(place: Storage, *, key: SSlibKey | None = None, recompute: Recompute = recompute_in_a_child) -> Verification:
    """Verify a run's folder, or a copy of its `final`, against the public key if there is one."""
    verification = Verification(place.address())
    if is_run(place):
        _Run(verification, place, key, recompute).check()
    else:
        model = _Model(verification, place, FINAL, None)
        model.check_signature(key)
        stated = model.provenance.get(_WEIGHTS_STATED)
        if model.manifest is not None and model.manifest.average:  # the chain has those that were averaged
            stated = None
        _check_weights(verification, recompute, [], place.address(), stated, {})
        verification.not_checked.append("config, metrics, checkpoints and dataset: give the folder of the run")
    return verification


def signable_digests(run: Storage, name: str = FINAL) -> dict[str, str]:
    """Return path to SHA-256 of a collected model's files, each read again. A DataError if one is not as recorded, or a
    statement says something else than the run."""
    final = run.within(name)
    verification = Verification(final.address())
    model = _Model(verification, final, name, run)
    if verification.problems:
        what = f"{final.address()} is not what was collected: {'; '.join(verification.problems[:_MOST_SHOWN])}"
        raise DataError(what, fix="collect the model again")
    return model.subjects


class _Model:
    """A collected model with its statements; `run` is None if the model was copied without its run."""

    def __init__(self, verification: Verification, place: Storage, shown: str, run: Storage | None) -> None:
        self._verification, self._place, self._shown = verification, place, shown
        self.provenance: Mapping[str, Any] = {}
        """The provenance as `_flat` returns it."""
        self.subjects: dict[str, str] = {}
        """The SHA-256 of each file."""
        self._parameters: Mapping[str, Any] = {}
        """The parameters that config.json has. A release that verifies may have more of them, with their defaults."""
        check, self.manifest = verification.begin("MODEL_FILES", f"files of {shown}"), None
        with check.reading():
            self.manifest = read_manifest(place, FinalManifest)
            if self.manifest is None:
                raise DataError(f"{shown}/{MANIFEST} is missing")
            check.records(place, self.manifest.files, f"{shown}/")
            check.strays(place, self.manifest.files, f"{shown}/")
            self.subjects = {record.path: record.sha256 for record in self.manifest.files if record.sha256}
            self.subjects[MANIFEST] = _sha256_at(place, MANIFEST)
            if shown == FINAL:
                verification.subjects = self.subjects
            self._check_statements(run)

    def _check_statements(self, run: Storage | None) -> None:
        check = self._verification.begin("STATEMENTS", f"facts in the statements of {self._shown}")
        statements = (PROVENANCE, PROVENANCE_TYPE, provenance_of), (TEST_RESULT, TEST_RESULT_TYPE, test_result_of)
        for name, kind, make in statements:
            shown = f"{self._shown}/{name}"
            with check.reading():
                content = self._place.read(name)
                stored = _flat(parse_json(content, dict[str, Any], where=shown, fix="collect the model again"))
                if name == PROVENANCE:
                    self.provenance = stored
                subjects = [descriptor(path, digest={"sha256": sha256}) for path, sha256 in self.subjects.items()]
                if run is not None:
                    config = parse_json(run.read(CONFIG), dict[str, Any], where=CONFIG, fix="restore it")
                    self._parameters = _flat(config.get("training"), _TRAINING)
                    made = json.dumps(make(run, self._shown) | {"subject": subjects})
                    self._compare(check, shown, stored, _flat(json.loads(made, parse_constant=str)))
                    continue
                stated = {path: value for path, value in stored.items() if path.startswith(("_type", "subject", _KIND))}
                kinds = {"_type": STATEMENT_TYPE, _KIND: kind}
                self._compare(check, shown, stated, _flat({"subject": subjects, **kinds}))
                for path in sorted({TEST_RESULT, MODEL_BILL, CROISSANT} & {*self._place.list()}):
                    folders = (FINAL, FINAL_AVERAGE) * (name == PROVENANCE)
                    digests = [stored.get(f"{_BYPRODUCTS}[{folder}/{path}].digest.sha256") for folder in folders]
                    if digests:
                        expected = next(filter(None, digests), None)
                        check.compare(f"{self._shown}/{path}: its sha256", _sha256_at(self._place, path), expected)

    def _compare(self, check: Check, shown: str, stored: Mapping[str, Any], made: Mapping[str, Any]) -> None:
        """Compare a statement with one that is made again, of what is here."""
        matches = [list(filter(None, map(_RESOURCE.match, each))) for each in (made, stored)]
        found, stated = ({match[0]: match[1] for match in each} for each in matches)
        absent = set[str]()
        for resource in stated.keys() - found.keys():  # a validation split has its URI in the provenance only
            uris = stored.get(f"{resource}.uri"), self.provenance.get(f"{_DEPENDENCIES}{stated[resource]}.uri")
            if f"{resource}.annotations.run" in stored or not _is_here(str(uris[0] or uris[1] or "")):
                absent.add(resource)  # an earlier run may be gone
        for path in dict.fromkeys([*stored, *made]):
            part = _RESOURCE.match(path)
            is_newer = path.startswith(_TRAINING) and path not in stored and path not in self._parameters
            if not path.startswith(_WRITER) and not is_newer and not (part and part[0] in absent):
                check.compare(f"{shown}: {path}", stored.get(path), made.get(path), source="the files give")
        if absent:
            self._verification.not_checked.append(f"{len(absent)} resources of {shown}: they are not here")

    def check_signature(self, key: SSlibKey | None) -> None:
        place, shown = self._place, self._shown
        if key is None:
            why = "is not signed"
            if place.exists(ATTESTATIONS):
                why = "is signed: give --public-key"
            self._verification.not_checked.append(f"the signature: {shown} {why}")
            return
        check = self._verification.begin("SIGNATURE", f"signatures of {shown} by the public key")
        with check.reading():
            statements, reason = verified_statements(place.read(ATTESTATIONS, most=MOST_BYTES), key)
            for name in (PROVENANCE, TEST_RESULT):
                problem = None
                if place.read(name) not in statements:
                    problem = f"{shown}/{ATTESTATIONS} has no signature of {name} as it is now: {reason}"
                check.add(problem)
        if key.keytype != "ecdsa":  # model_signing takes no other
            return
        with check.reading():
            try:
                signed = verified_digests(place.read(MODEL_SIGNATURE, most=MOST_BYTES), key)
            except BadSignature as error:
                raise DataError(f"{shown}/{MODEL_SIGNATURE} was not made by this key: {error}") from error
            for path in sorted({*self.subjects, *signed}):
                check.compare(f"{shown}/{MODEL_SIGNATURE}: {path}", signed.get(path), self.subjects.get(path))


class _Run:
    def __init__(self, verification: Verification, run: Storage, key: SSlibKey | None, recompute: Recompute) -> None:
        self._verification, self._run, self._key, self._recompute = verification, run, key, recompute

    def check(self) -> None:
        final = self._check_model(FINAL)
        self._check_model(FINAL_AVERAGE)
        spec, rows = self._check_files(final)
        links, sound = self._check_checkpoints(rows)
        model, provenance = None, dict[str, Any]()
        if final is not None:
            provenance |= final.provenance
            model = self._check_end(final.manifest, links)
        if spec is None:
            self._verification.not_checked.append(f"the dataset and the weights: {CONFIG} cannot be read")
            return
        self._check_settings(spec)
        arguments, dataset = ["--run", self._run.address()], self._check_dataset(spec, provenance)
        if dataset is not None:
            digested = (row["step"] for row in rows if not {"batch_sha256", "batches_sha256"}.isdisjoint(row))
            steps = min(spec.steps, max(digested, default=0))
            arguments += ["--dataset", dataset, "--batches", str(steps)]
        weights = {step: links[step].weights for step in sound if step in links}
        found = _check_weights(self._verification, self._recompute, arguments, self._run.address(FINAL), model, weights)
        if found is not None and dataset is not None:
            self._check_batches(spec, found.batches, rows, links)

    def _check_end(self, final: FinalManifest | None, links: Mapping[int, Link]) -> str | None:
        """Compare the chain of the model with that of its checkpoint, and return the digest of that one's weights."""
        if final is None or final.chain is None:
            return None
        if final.step not in links:
            self._chain.add(f"{METRICS} has no checkpoint of step {final.step}, of which the model is")
            return None
        self._chain.compare(f"{FINAL}/{MANIFEST}: its chain", final.chain, links[final.step].chain)
        return links[final.step].weights

    def _check_model(self, name: str) -> _Model | None:
        place = self._run.within(name)
        if not place.list():
            if name == FINAL and self._key is not None:
                check = self._verification.begin("SIGNATURE", f"signatures of {FINAL} by the public key")
                check.add(f"there is no {FINAL} that the public key could verify")
            elif name == FINAL:
                self._verification.not_checked.append(f"the model: there is no {FINAL}, so it was not collected")
            return None
        model = _Model(self._verification, place, name, self._run)
        model.check_signature(self._key)
        if name != FINAL:
            self._verification.not_checked.append(f"the weights of {name}: no digest of them is recorded")
        return model

    def _check_files(self, final: _Model | None) -> tuple[TrainingSpec | None, list[Row]]:
        run, check = self._run, self._verification.begin("RUN_FILES", "files of the run")
        spec, rows, bad = None, list[Row](), damaged_lines()
        with check.reading():
            spec = read_spec(run)
            check.add()
        rows += read_metrics(run, bad)
        if rows and not bad.count:
            check.add()
        else:
            check.add(f"{METRICS} has no rows, or some that cannot be read: {bad}")
        with check.reading():
            manifest = read_manifest(run, RunManifest)
            if manifest is None:
                self._verification.not_checked.append(f"the run's {MANIFEST}: there is none, so the run did not end")
            else:
                check.records(run, manifest.files, "")
                if final is not None and final.manifest is not None and final.manifest.complete:
                    self._check_figures(check, manifest, final.manifest)
        return spec, rows

    def _check_figures(self, check: Check, manifest: RunManifest, model: FinalManifest) -> None:
        for name in ("run", "step", "tokens", "validation_loss"):
            found, expected = getattr(manifest, name), getattr(model, name)
            # Another machine, which collected the model again, rounds the loss in another way.
            if name == "validation_loss" and found is not None and math.isclose(found, expected, rel_tol=1e-3):
                found = expected
            check.compare(f"{MANIFEST}: its {name}", found, expected)

    def _check_settings(self, spec: TrainingSpec) -> None:
        """Compare the settings that decide the model. A replay reads those of an attempt."""
        check = self._verification.begin("SETTINGS", "settings of attempts and checkpoints")
        expected = _decisive(spec)
        for number in attempt_numbers(self._run):
            attempt = self._run.within(f"{ATTEMPTS}/{number}")
            if attempt.exists(CONFIG):
                with check.reading():
                    _compare_known(check, f"{ATTEMPTS}/{number}/{CONFIG}", _decisive(read_spec(attempt)), expected)
        for manifest in list_complete(self._run):
            stored = _flat({"dataset_hash": manifest.dataset_hash, **manifest.config})
            _compare_known(check, f"{folder_of(manifest.step)}/{MANIFEST}", stored, expected)

    def _check_dataset(self, spec: TrainingSpec, provenance: Mapping[str, Any]) -> str | None:
        """Return the address of the dataset if it verifies: the recorded one, or the same folder in this root."""
        own = self._run.address().rpartition("/runs/")[0]
        candidates = (spec.dataset, f"{own}/datasets/{spec.dataset.rpartition('/')[2]}")
        address = next((place for place in candidates if open_storage(place).exists(MANIFEST)), None)
        if address is None:
            self._verification.not_checked.append(f"the dataset: {spec.dataset} is not here")
            return None
        check = self._verification.begin("DATASET", f"files of the dataset {address}")
        try:
            manifest = verify_dataset(address)
        except DataError as error:
            check.problems += error.what.split("\n✗ ")[1:] or [error.what]
            return None
        check.count += len(manifest.files)
        check.compare(f"{CONFIG}: the dataset's hash", spec.dataset_hash, manifest.content_hash)
        if not provenance:
            return address
        for storage, part in datasets_of(address):
            folder = f"datasets/{storage.address().rpartition('/')[2]}"
            digests = {record.path: record.sha256 for record in part.files if record.sha256}
            for path, digest in {**digests, MANIFEST: _sha256_at(storage, MANIFEST)}.items():
                stated = provenance.get(f"{_DEPENDENCIES}[{folder}/{path}].digest.sha256")
                check.compare(f"{FINAL}/{PROVENANCE}: {folder}/{path}", stated, digest)
        return address

    def _check_checkpoints(self, rows: Sequence[Row]) -> tuple[dict[int, Link], list[int]]:
        """Return step to link, by the metrics and the kept checkpoints, and the steps whose files are as recorded."""
        check, sound, kept = self._verification.begin("CHECKPOINTS", "files of kept checkpoints"), [], {}
        for manifest in list_complete(self._run, on_damaged=lambda _, error: check.add(error.what)):
            folder, before = folder_of(manifest.step), len(check.problems)
            check.records(self._run.within(folder), manifest.files, f"{folder}/")
            check.strays(self._run.within(folder), manifest.files, f"{folder}/")
            if len(check.problems) == before:
                sound.append(manifest.step)
            if manifest.link is not None:
                kept[manifest.step] = manifest.link
        self._chain = check = self._verification.begin("CHAIN", "links of the chain of checkpoints")
        recorded = {row["step"]: row for row in rows if row["kind"] == "checkpoint" and "chain_sha256" in row}
        starts = {row["step"] for row in rows if row["kind"] == "start"} - {*recorded, *kept}
        links, previous, last = dict[int, Link](), NO_LINK, 0
        for step in sorted({*kept, *recorded}):
            where, columns = f"{METRICS}: the checkpoint of step {step}", recorded.get(step)
            link = kept.get(step) or _link_of(columns or {})
            if step in kept and columns is not None:
                for name, value in link.columns().items():
                    check.compare(f"{folder_of(step)}/{MANIFEST}: its link's {name}", value, columns.get(name))
            check.compare(f"{where}: chain_sha256", link.chain, _made_again(link))
            # After a kill between a save and its row, the next attempt begins at a step that has no row of a save.
            if link.since == 0 and not any(last < start < step for start in starts):
                check.compare(f"{where}: previous_chain", link.previous, previous)
            links[step], previous, last = link, link.chain, step
        for before, after in reversed([*pairwise(sorted(links))]):  # a row does not say since when
            if before not in kept and links[after].previous == links[before].chain:
                links[before] = links[before].model_copy(update={"since": links[after].since})
        return links, sound

    def _check_batches(
        self, spec: TrainingSpec, batches: Sequence[str], rows: Sequence[Row], links: Mapping[int, Link]
    ) -> None:
        check = self._verification.begin("BATCHES", "batches of the dataset")
        sums = {link.since: Chain() for link in links.values()}
        first = max(sums, default=0)
        if first:
            why = "an older version recorded no digests"
            self._verification.not_checked.append(f"the batches up to step {first}: {why}")
        digests = {row["step"]: row["batch_sha256"] for row in rows if "batch_sha256" in row}
        skipped = {row["step"] for row in rows if row["kind"] == "skip"}  # these have no row of a step
        for step, batch in enumerate(batches, 1):
            if step in digests or (spec.train.log_every == 1 and step not in skipped and step > first):
                check.compare(f"{METRICS}: batch_sha256 of step {step}", digests.get(step), batch)
            for since, chain in sums.items():
                if step > since:
                    chain.add(step, batch)
            if step in links:
                expected = sums[links[step].since].batches
                check.compare(f"{METRICS}: batches_sha256 of step {step}", links[step].batches, expected)


def _decisive(spec: TrainingSpec) -> dict[str, Any]:
    """Return path to value of the settings that every attempt of a run has alike."""
    origin = None
    if spec.origin is not None:
        origin = spec.origin.content_hash
    model = spec.model.model_dump(mode="json", exclude={"init_from"})  # an address, which may be another by now
    settings = {"model": model, "train": spec.train.shaping_settings()}
    return _flat({"dataset_hash": spec.dataset_hash, "steps": spec.steps, "origin": origin, **settings})


def _compare_known(check: Check, shown: str, stored: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for path in stored.keys() & expected.keys():  # an older version has fewer settings
        check.compare(f"{shown}: {path}", stored[path], expected[path], source=f"{CONFIG} has")


def _link_of(columns: Row) -> Link:
    names = ("previous_chain", "weights_sha256", "batches_sha256", "chain_sha256")
    previous, weights, batches, chain = (str(columns.get(name, "")) for name in names)
    return Link(previous=previous, weights=weights, batches=batches, chain=chain)


def _made_again(link: Link) -> str | None:
    """Return the chain of a link by its other digests; None if those are not digests."""
    try:
        return Link.of(previous=link.previous, weights=link.weights, batches=link.batches, since=link.since).chain
    except ValueError:
        return None


def _check_weights(
    verification: Verification, recompute: Recompute, arguments: Sequence[str], final: str, model: str | None,
    checkpoints: Mapping[int, str],
) -> RecomputedDigests | None:  # fmt: skip
    """Compare the weights of the model and of checkpoints with these digests; return all that was computed."""
    arguments = [*arguments]
    if model is not None:
        arguments += ["--final", final]
    if checkpoints:
        arguments += ["--checkpoints", *map(str, sorted(checkpoints))]
    if not arguments:
        verification.not_checked.append("the weights: no digest of them is recorded")
        return None
    check, found = verification.begin("WEIGHTS", "digests of weights"), None
    with check.reading():
        found = recompute(arguments)
        check.problems += found.problems
        if found.model is not None:
            check.compare(f"{FINAL}/litgpt/lit_model.pth: the digest of its weights", found.model, model)
        for step, digest in found.checkpoints.items():
            check.compare(f"{folder_of(step)}: the digest of its weights", digest, checkpoints[step])
    return found


def _sha256_at(storage: Storage, path: str) -> str:
    local = storage.local_path(path)
    if local is not None:
        return sha256_of(local)
    with tempfile.TemporaryDirectory(prefix="train-litgpt-verify-") as folder:
        storage.download(path, Path(folder, "file"))
        return sha256_of(Path(folder, "file"))


def _difference(what: str, found: Any, expected: Any, source: str = "it should be") -> str | None:
    if found == expected:
        return None
    return f"{what} is {_shown(found)}, but {source} {_shown(expected)}"


def _shown(value: Any) -> str:
    if value is None:
        return "absent"
    return str(value)[:200]


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return path to value of all plain values in a JSON document. Parts of a list have their own names in the path."""
    parts: dict[str, Any]
    match value:
        case dict():
            parts = {f"{path}.{name}".lstrip("."): part for name, part in value.items()}
        case [{"name": _}, *_]:
            parts = {f"{path}[{_within(part, 'name')}]": part for part in value}
            if len(parts) < len(value):  # two of the same name
                parts = {f"{path}[{place}]": part for place, part in enumerate(value)}
        case list():
            parts = {f"{path}[{place}]": part for place, part in enumerate(value)}
        case _:
            return {path: value}
    return {below: plain for name, part in parts.items() for below, plain in _flat(part, name).items()}


def _within(part: Any, name: str) -> Any:
    if isinstance(part, dict):
        return part.get(name)
    return None


def _is_here(uri: str) -> bool:
    """Return whether the file of a URI exists for this machine. URIs of packages are names, which are always here."""
    parts = urlsplit(uri)
    if parts.scheme not in {"file", "gs"}:
        return True
    if parts.scheme == "file":
        uri = unquote(parts.path)
    folder, _, name = uri.rpartition("/")
    try:
        return open_storage(folder).exists(name)
    except TrainLitgptError:
        return False
