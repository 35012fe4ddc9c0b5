"""Verification of a run, or of a copy of its model: every digest that is recorded, computed again.

Everything that is read may have been written by others. A difference is a problem that names the file. Parts that
cannot be checked from here are listed apart, and never count as verified.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from launcher.formatting import shown
from launcher.provenance.dependencies import attempt_numbers, dataset_dependencies, digest_of, recorded_digest
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
    STATEMENT_TYPE,
    STATEMENTS,
    TEST_RESULT,
    subjects_of,
)
from launcher.runs.run import RunManifest
from litgpt_demo.config import TrainingSpec
from litgpt_demo.data.dataset import verify_dataset
from litgpt_demo.documents import MOST_BYTES, FileRecord, parse_json, read_manifest
from litgpt_demo.errors import DataError, TrainLitgptError
from litgpt_demo.export import FinalManifest
from litgpt_demo.metrics import Row, damaged_lines
from litgpt_demo.runs import ATTEMPTS, CONFIG, FINAL, FINAL_AVERAGE, METRICS, dataset_address, read_metrics, read_spec
from litgpt_demo.storage import MANIFEST, Storage, open_storage
from litgpt_demo.training.chain import NO_LINK, Chain, Link
from litgpt_demo.training.checkpoints import folder_of, list_complete

if TYPE_CHECKING:
    from securesystemslib.signer import SSlibKey

VERIFIER = f"{PAGE}#verifier-v1"
_SVR_TYPE = "https://in-toto.io/attestation/svr/v0.2"
_BYPRODUCTS = "predicate.runDetails.byproducts"
_DEPENDENCIES = "predicate.buildDefinition.resolvedDependencies"
_RESOURCE = re.compile(r"predicate\.(?:buildDefinition\.resolvedDependencies|configuration)\[[^\]]*\]")
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

    @property
    def is_empty(self) -> bool:
        return not self.count and not self.problems

    def require(self, holds: bool, problem: str) -> None:
        """Count an item, which has this problem unless it holds."""
        self.count += 1
        if not holds:
            self.problems.append(problem)

    def compare(self, what: str, found: Any, expected: Any, *, source: str = "it should be") -> None:
        """Count an item, which has a problem unless both values are equal."""
        values = [shown(str, value, "absent")[:200] for value in (found, expected)]
        self.require(found == expected, f"{what} is {values[0]}, but {source} {values[1]}")

    def files(self, storage: Storage, records: Sequence[FileRecord], prefix: str = "") -> None:
        """Read files, and compare each with its record."""

        def digest(record: FileRecord) -> str | None:
            with suppress(FileNotFoundError):
                try:
                    if record.sha256:
                        return digest_of(storage, record.path)["sha256"]
                    return storage.stat(record.path).crc32c
                except TrainLitgptError as error:  # such as a path that leaves the folder
                    return f"unreadable ({error.what})"
            return None

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = list(pool.map(digest, records))
        for record, value in zip(records, found, strict=True):
            [(kind, expected)] = recorded_digest(record).items()
            self.compare(f"{prefix}{record.path}: its {kind}", value, expected)

    def folder(self, storage: Storage, records: Sequence[FileRecord], title: str) -> None:
        """Compare each file of a folder with its record. One that no manifest lists is a problem."""
        self.files(storage, records, f"{title}/")
        strays = {*storage.list()} - {record.path for record in records} - {MANIFEST, *UNLISTED}
        self.problems += [f"{title}/{path} is not in its manifest" for path in sorted(strays)]

    def settings(self, what: str, stored: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
        """Compare the settings that both have."""
        for path in stored.keys() & expected.keys():
            self.compare(f"{what}: {path}", stored[path], expected[path], source=f"{CONFIG} has")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Make a problem of an error about stored data."""
        try:
            yield
        except TrainLitgptError as error:
            self.require(False, error.what)
        except FileNotFoundError as error:
            self.require(False, f"{error.filename} is missing")


@dataclass
class Verification:
    address: str
    checks: list[Check] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    """A sentence for each part that could not be checked."""
    subjects: list[dict[str, Any]] = field(default_factory=list)
    """The files of the model with their SHA-256, as resource descriptors."""

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
        return {"_type": STATEMENT_TYPE, "subject": self.subjects, "predicateType": _SVR_TYPE, "predicate": predicate}


def is_run(place: Storage) -> bool:
    return place.exists(CONFIG) or place.exists(f"{FINAL}/{MANIFEST}")


def is_model(place: Storage) -> bool:
    """Return whether a folder is a copy of a run's `final`."""
    return any(place.exists(path) for path in (PROVENANCE, ATTESTATIONS, "lineage.json"))


def verify(place: Storage, *, key: SSlibKey | None = None) -> Verification:
    """Verify a run's folder, or a copy of its `final`, against the public key if there is one."""
    verification = Verification(place.address())
    if is_run(place):
        _Run(verification, place, key).check()
    else:
        model = _Model(verification, place, FINAL, None)
        model.check_signature(key)
        recorded = model.provenance.get(f"{_BYPRODUCTS}[chain].annotations.weights_sha256")
        model.check_weights(verification.begin("WEIGHTS", "digests of weights"), recorded)
        verification.not_checked.append("config, metrics, checkpoints and dataset: give the folder of the run")
    verification.not_checked += [check.what for check in verification.checks if check.is_empty]
    verification.checks = [check for check in verification.checks if not check.is_empty]
    return verification


def signable_model(run: Storage, name: str = FINAL) -> tuple[str, dict[str, str]]:
    """Return the run of a collected model, and path to SHA-256 of its files, each read again.

    A DataError if a file is not as recorded, or a statement says something else than the run.
    """
    place = run.within(name)
    verification = Verification(place.address())
    model = _Model(verification, place, name, run)
    if model.manifest is None or verification.problems:
        what = f"{place.address()} is not what was collected: {'; '.join(verification.problems[:_MOST_SHOWN])}"
        raise DataError(what, fix="collect the model again")
    return model.manifest.run, model.digests


class _Model:
    """A collected model with its statements; `run` is None if the model was copied without its run."""

    def __init__(self, verification: Verification, place: Storage, shown: str, run: Storage | None) -> None:
        self._verification, self._place, self._shown, self._run = verification, place, shown, run
        self.provenance: Mapping[str, Any] = {}
        """The provenance as `_flat` returns it."""
        self._subjects = list[dict[str, Any]]()
        check, self.manifest = verification.begin("MODEL_FILES", f"files of {shown}"), None
        with check.reading():
            self.manifest = read_manifest(place, FinalManifest)
            if self.manifest is None:
                raise DataError(f"{shown}/{MANIFEST} is missing")
            check.folder(place, self.manifest.files, shown)
            self._subjects = subjects_of(place, self.manifest)
            if shown == FINAL:
                verification.subjects = self._subjects
            self._check_statements()

    @property
    def is_average(self) -> bool:
        return self.manifest is not None and self.manifest.average

    @property
    def digests(self) -> dict[str, str]:
        return {subject["name"]: subject["digest"].get("sha256", "") for subject in self._subjects}

    def _check_statements(self) -> None:
        check = self._verification.begin("STATEMENTS", f"facts in the statements of {self._shown}")
        is_at_end = self.manifest is not None and self.manifest.complete
        if self._run is not None and not is_at_end:
            what = f"facts about the run in the statements of {self._shown}: it was collected on the way"
            self._verification.not_checked.append(what)
        for name, (kind, make) in STATEMENTS.items():
            shown = f"{self._shown}/{name}"
            with check.reading():
                content = self._place.read(name)
                stored = _flat(parse_json(content, dict[str, Any], where=shown, fix="collect the model again"))
                if name == PROVENANCE:
                    self.provenance = stored
                if self._run is not None and is_at_end:
                    self._compare(check, shown, stored, _flat(make(self._run, self._shown)))
                    continue
                made = _flat({"_type": STATEMENT_TYPE, "predicateType": kind, "subject": self._subjects})
                if name == PROVENANCE:
                    made |= self._byproducts()
                stored = {fact: value for fact, value in stored.items() if fact in made or fact.startswith("subject")}
                self._compare(check, shown, stored, made)

    def _byproducts(self) -> dict[str, str]:
        folder = FINAL
        if self.is_average:
            folder = FINAL_AVERAGE
        paths = {TEST_RESULT, MODEL_BILL, CROISSANT} & {*self._place.list()}
        digests = {path: digest_of(self._place, path)["sha256"] for path in sorted(paths)}
        return {f"{_BYPRODUCTS}[{folder}/{path}].digest.sha256": digest for path, digest in digests.items()}

    def _compare(self, check: Check, shown: str, stored: Mapping[str, Any], made: Mapping[str, Any]) -> None:
        stated, found = ({match[0] for match in map(_RESOURCE.match, facts) if match} for facts in (stored, made))
        for fact in dict.fromkeys([*stored, *made]):
            resource = _RESOURCE.match(fact)
            is_here = resource is None or resource[0] in found
            # A run may be copied to another root.
            is_place = fact.endswith(".uri") and str(stored.get(fact)).startswith(("file:", "gs:"))
            if is_here and not is_place and not fact.startswith(_WRITER):
                check.compare(f"{shown}: {fact}", stored.get(fact), made.get(fact), source="the files give")
        absent = stated - found  # of earlier runs too, which may be gone
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
            for name in STATEMENTS:
                problem = f"{shown}/{ATTESTATIONS} has no signature of {name} as it is now: {reason}"
                check.require(place.read(name) in statements, problem)
        if key.keytype != "ecdsa":  # model_signing takes no other
            return
        with check.reading():
            try:
                signed = verified_digests(place.read(MODEL_SIGNATURE, most=MOST_BYTES), key)
            except BadSignature as error:
                raise DataError(f"{shown}/{MODEL_SIGNATURE} was not made by this key: {error}") from error
            for path in sorted({*self.digests, *signed}):
                found = self.digests.get(path)
                check.compare(f"{shown}/{MODEL_SIGNATURE}: {path}", signed.get(path), found, source="the files give")

    def check_weights(self, check: Check, recorded: str | None) -> None:
        if recorded is None or self.is_average:  # the chain has those that were averaged
            self._verification.not_checked.append(f"the weights of {self._shown}: no digest of them is recorded")
            return
        from litgpt_demo.export.recomputing import weights_of_model  # imports torch

        with check.reading():
            what = f"{self._shown}/litgpt/lit_model.pth: the digest of its weights"
            check.compare(what, weights_of_model(self._place), recorded)


class _Run:
    def __init__(self, verification: Verification, run: Storage, key: SSlibKey | None) -> None:
        self._verification, self._run, self._key = verification, run, key

    def check(self) -> None:
        final = self._check_model(FINAL)
        average = self._check_model(FINAL_AVERAGE)
        spec, rows = self._check_files(final)
        sound = self._check_checkpoints()
        chain = self._verification.begin("CHAIN", "links of the chain of checkpoints")
        links, weights = self._check_chain(chain, rows), self._verification.begin("WEIGHTS", "digests of weights")
        if final is not None and final.manifest is not None:
            end = links.get(final.manifest.step)
            chain.compare(f"{FINAL}/{MANIFEST}: its chain", final.manifest.chain, getattr(end, "chain", None))
            final.check_weights(weights, getattr(end, "weights", None))
        if average is not None:
            average.check_weights(weights, None)
        if spec is None:
            self._verification.not_checked.append(f"the dataset and the checkpoints: {CONFIG} cannot be read")
            return
        self._check_settings(spec)
        self._check_weights(weights, {step: links[step].weights for step in sound if step in links})
        dataset = self._check_dataset(spec, final)
        if dataset is not None:
            self._check_batches(spec, dataset, rows, links)

    def _check_model(self, name: str) -> _Model | None:
        place = self._run.within(name)
        if not place.list():
            if name == FINAL and self._key is not None:
                check = self._verification.begin("SIGNATURE", f"signatures of {FINAL} by the public key")
                check.require(False, f"there is no {FINAL} that the public key could verify")
            elif name == FINAL:
                self._verification.not_checked.append(f"the model: there is no {FINAL}, so it was not collected")
            return None
        model = _Model(self._verification, place, name, self._run)
        model.check_signature(self._key)
        return model

    def _check_files(self, final: _Model | None) -> tuple[TrainingSpec | None, list[Row]]:
        run, check = self._run, self._verification.begin("RUN_FILES", "files of the run")
        spec, bad = None, damaged_lines()
        with check.reading():
            spec = read_spec(run)
            check.count += 1
        rows = list[Row](read_metrics(run, bad))
        check.require(bool(rows) and not bad.count, f"{METRICS} has no rows, or some that cannot be read: {bad}")
        with check.reading():
            manifest = read_manifest(run, RunManifest)
            if manifest is None:
                self._verification.not_checked.append(f"the run's {MANIFEST}: there is none, so the run did not end")
            else:
                check.files(run, manifest.files)
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
        check, decisive = self._verification.begin("SETTINGS", "settings of attempts and checkpoints"), _decisive(spec)
        for number in attempt_numbers(self._run):
            attempt = self._run.within(f"{ATTEMPTS}/{number}")
            if attempt.exists(CONFIG):
                with check.reading():
                    check.settings(f"{ATTEMPTS}/{number}/{CONFIG}", _decisive(read_spec(attempt)), decisive)
        for manifest in list_complete(self._run):
            stored = _flat({"dataset_hash": manifest.dataset_hash, "tokens": manifest.tokens, **manifest.config})
            expected = {**decisive, "tokens": spec.tokens_after(manifest.step)}
            check.settings(f"{folder_of(manifest.step)}/{MANIFEST}", stored, expected)

    def _check_checkpoints(self) -> list[int]:
        """Return the steps of the checkpoints whose files are as recorded."""
        check, sound = self._verification.begin("CHECKPOINTS", "files of kept checkpoints"), list[int]()
        for manifest in list_complete(self._run, on_damaged=lambda _, error: check.require(False, error.what)):
            folder, before = folder_of(manifest.step), len(check.problems)
            check.folder(self._run.within(folder), manifest.files, folder)
            if len(check.problems) == before:
                sound.append(manifest.step)
        return sound

    def _check_chain(self, check: Check, rows: Sequence[Row]) -> dict[int, Link]:
        """Return step to link, by the kept checkpoints or else by the metrics."""
        links = {manifest.step: manifest.link for manifest in list_complete(self._run) if manifest.link is not None}
        recorded = {row["step"]: row for row in rows if row["kind"] == "checkpoint" and "chain_sha256" in row}
        previous = NO_LINK
        for step in sorted({*links, *recorded}):
            where, columns = f"{METRICS}: the checkpoint of step {step}", recorded.get(step)
            if columns is not None and step in links:
                for name, value in links[step].columns().items():
                    check.compare(f"{folder_of(step)}/{MANIFEST}: its link's {name}", value, columns.get(name))
            elif columns is not None:
                try:
                    links[step] = _link_of(columns)
                except ValueError:
                    check.require(False, f"{where} has other digests than 64 hexadecimal digits")
                    continue
                check.compare(f"{where}: chain_sha256", columns["chain_sha256"], links[step].chain)
            check.compare(f"{where}: previous_chain", links[step].previous, previous)
            previous = links[step].chain
        return links

    def _check_weights(self, check: Check, recorded: Mapping[int, str]) -> None:
        from litgpt_demo.export.recomputing import weights_of_checkpoint  # imports torch

        for step, digest in recorded.items():
            with check.reading():
                what = f"{folder_of(step)}: the digest of its weights"
                check.compare(what, weights_of_checkpoint(self._run, step), digest)

    def _check_dataset(self, spec: TrainingSpec, final: _Model | None) -> str | None:
        """Return the address of the dataset if it verifies."""
        address = dataset_address(self._run, spec.dataset)
        if not open_storage(address).exists(MANIFEST):
            self._verification.not_checked.append(f"the dataset: {spec.dataset} is not here")
            return None
        check = self._verification.begin("DATASET", f"files of the dataset {address}")
        try:
            manifest = verify_dataset(address)
        except DataError as error:
            for problem in error.what.split("\n✗ ")[1:] or [error.what]:
                check.require(False, problem)
            return None
        check.count += len(manifest.files)
        check.compare(f"{CONFIG}: the dataset's hash", spec.dataset_hash, manifest.content_hash)
        if final is None or not final.provenance:
            return address
        for resource in dataset_dependencies(address):
            name, digest = resource["name"], resource["digest"].get("sha256")
            stated = final.provenance.get(f"{_DEPENDENCIES}[{name}].digest.sha256")
            check.compare(f"{FINAL}/{PROVENANCE}: {name}", stated, digest, source="the dataset has")
        return address

    def _check_batches(self, spec: TrainingSpec, dataset: str, rows: Sequence[Row], links: Mapping[int, Link]) -> None:
        from litgpt_demo.export.recomputing import digests_of_batches  # imports torch

        check, chain = self._verification.begin("BATCHES", "batches of the dataset"), Chain()
        digests = {row["step"]: row["batch_sha256"] for row in rows if "batch_sha256" in row}
        skipped = {row["step"] for row in rows if row["kind"] == "skip"}  # these have no row of a step
        steps = min(spec.steps, max([*digests, *links], default=0))
        with check.reading():
            for step, batch in enumerate(digests_of_batches(self._run, dataset, steps), 1):
                if step in digests or (spec.train.log_every == 1 and step not in skipped):
                    check.compare(f"{METRICS}: batch_sha256 of step {step}", digests.get(step), batch)
                chain.add(step, batch)
                if step in links:
                    check.compare(f"{METRICS}: batches_sha256 of step {step}", links[step].batches, chain.batches)


def _decisive(spec: TrainingSpec) -> dict[str, Any]:
    """Return path to value of the settings that every attempt of a run has alike."""
    model = spec.model.model_dump(mode="json", exclude={"init_from"})  # an address, which may be another by now
    settings = {"model": model, "train": spec.train.shaping_settings()}
    origin = getattr(spec.origin, "content_hash", None)
    return _flat({"dataset_hash": spec.dataset_hash, "steps": spec.steps, "origin": origin, **settings})


def _link_of(columns: Row) -> Link:
    names = {"previous": "previous_chain", "weights": "weights_sha256", "batches": "batches_sha256"}
    return Link.model_validate({field: columns.get(name) for field, name in names.items()})


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return path to value of all plain values in a JSON document. Parts of a list have their own names in the path."""
    parts, seen = dict[str, Any](), Counter[str]()
    match value:
        case dict():
            parts = {f"{path}.{name}".lstrip("."): part for name, part in value.items()}
        case list():
            for place, part in enumerate(value):
                name = str(place)
                if isinstance(part, dict):
                    name = str(part.get("name", place))
                seen[name] += 1
                if seen[name] > 1:  # two of the same name
                    name = f"{name}, {seen[name]}"
                parts[f"{path}[{name}]"] = part
        case _:
            return {path: value}
    return {below: plain for name, part in parts.items() for below, plain in _flat(part, name).items()}
