"""Statements about a run's collected model: its provenance, and the results of its collection.

Both are in-toto Statements v1 (https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md), made from the
run's own files and the manifests that these name. The same files give the same bytes. Unknown facts are left out.
docs/reference/provenance.md defines each field.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

import litgpt_demo
from launcher.images.identity import OURS, SBOM
from launcher.provenance.dependencies import (
    attempt_numbers,
    datasets_of,
    dependencies_of,
    descriptor,
    digest_of,
    files_of,
    recorded_digest,
)
from launcher.provenance.metadata import CROISSANT, MODEL_BILL, croissant_of, model_bill_of
from launcher.runs.index import AttemptDiagnosis
from launcher.runs.run import models_of, renew_manifest, trained_seconds
from litgpt_demo.documents import FileRecord, parse_json, read_manifest
from litgpt_demo.errors import DataError, UserError
from litgpt_demo.export import FinalManifest
from litgpt_demo.export.evaluation import Evaluation, evaluations_by_path
from litgpt_demo.metrics import Row
from litgpt_demo.runs import (
    ATTEMPTS,
    CONFIG,
    FINAL,
    METRICS,
    REPORT,
    dataset_address,
    node_reports,
    read_document,
    read_metrics,
)
from litgpt_demo.storage import MANIFEST, Storage

PROVENANCE = "provenance.intoto.json"
TEST_RESULT = "test-result.intoto.json"

PAGE = "https://github.com/train-litgpt/train-litgpt/blob/main/docs/reference/provenance.md"
BUILD_TYPE = f"{PAGE}#build-type-v1"
BUILDER = f"{PAGE}#builder"

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PROVENANCE_TYPE = "https://slsa.dev/provenance/v1"
TEST_RESULT_TYPE = "https://in-toto.io/attestation/test-result/v0.1"

_MACHINES = ("kind", "machine", "nodes", "processes_per_node")
"""Settings of a platform that say what an attempt ran on."""
_START = ("step", "world_size", "device", "device_name", "precision")
"""Columns of a row of metrics that say how an attempt began."""


def write_statements(run: Storage, place: str = FINAL) -> tuple[FileRecord, ...]:
    """Write both statements next to the model of `place`, with the metadata that they name: the bill of the model, and
    the datasets in Croissant. Return their records, with paths below the run's folder, whose manifest gets them too.

    A file that has these bytes already is not touched. A UserError if there is no model.
    """
    final = _final_of(run, place)
    documents = {MODEL_BILL: model_bill_of(run, final), CROISSANT: croissant_of(run)}
    written = [_write(run, f"{place}/{name}", content) for name, content in documents.items() if content is not None]
    # Last, because it has the digests of the others.
    for name, (_, make) in STATEMENTS.items():
        written.append(_write(run, f"{place}/{name}", make(run, place)))
    if place == FINAL:
        renew_manifest(run, (*models_of(final), *written))
    return tuple(written)


def _write(run: Storage, path: str, document: Mapping[str, Any]) -> FileRecord:
    content = (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()
    digest = sha256(content).hexdigest()
    with suppress(FileNotFoundError):
        if run.read(path) == content:
            return FileRecord.of(run.stat(path), sha256=digest)
    return FileRecord.of(run.write(path, content), sha256=digest)


def provenance_of(run: Storage, place: str = FINAL) -> dict[str, Any]:
    """Return the provenance of the model of `place`: a statement with the predicate SLSA provenance v1."""
    final = _final_of(run, place)
    config = parse_json(run.read(CONFIG), dict[str, Any], where=run.address(CONFIG), fix="restore it")
    rows = [row for row in read_metrics(run) if row["step"] <= final.step]
    attempts = _attempts(run, rows)
    times = [time for attempt in attempts for time in (attempt.get("started"), attempt.get("ended")) if time]
    metadata = {"invocationId": final.run}
    if times:
        metadata |= {"startedOn": min(times), "finishedOn": max(times)}
    internal = {
        "step": final.step,
        "tokens": final.tokens,
        "seconds": trained_seconds(rows),
        "attempts": attempts,
        "skippedSteps": _skipped(rows),
    }
    predicate = {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": {name: config.get(name, {}) for name in ("run", "training")},
            "internalParameters": internal,
            "resolvedDependencies": dependencies_of(run),
        },
        "runDetails": {
            "builder": {"id": BUILDER, "version": {OURS: litgpt_demo.__version__}},
            "metadata": metadata,
            "byproducts": _byproducts(run, place, final, rows),
        },
    }
    return _statement(run, place, final, PROVENANCE_TYPE, predicate)


def test_result_of(run: Storage, place: str = FINAL) -> dict[str, Any]:  # noqa: PT028 - not a test of pytest
    """Return the results of collection and evaluations of the model of `place`: a statement with the predicate test
    result v0.1."""
    final = _final_of(run, place)
    tests = [*_tests_of_collection(final), *_tests_of_evaluation(run, final)]
    names = {outcome: [test["name"] for test in tests if test["outcome"] == outcome] for outcome in _OUTCOMES}
    worst = next((outcome for outcome in _OUTCOMES if names[outcome]), "PASSED")
    predicate = {
        "result": worst,
        "configuration": _configuration(run, final),
        "passedTests": names["PASSED"],
        "warnedTests": names["WARNED"],
        "failedTests": names["FAILED"],
        "trainlitgpt_tests": tests,
    }
    return _statement(run, place, final, TEST_RESULT_TYPE, predicate)


STATEMENTS = {TEST_RESULT: (TEST_RESULT_TYPE, test_result_of), PROVENANCE: (PROVENANCE_TYPE, provenance_of)}
"""The type of each predicate and what makes it, in the order of their writing: the last has the digest of the other."""
_OUTCOMES = ("FAILED", "WARNED", "PASSED")


def _final_of(run: Storage, place: str) -> FinalManifest:
    final = read_manifest(run.within(place), FinalManifest)
    if final is None:
        raise UserError(f"{run.address(place)} has no model", fix=f"collect it: train-litgpt collect {run.address()}")
    return final


def _statement(
    run: Storage, place: str, final: FinalManifest, kind: str, predicate: Mapping[str, Any]
) -> dict[str, Any]:
    subjects = subjects_of(run.within(place), final)
    statement = {"_type": STATEMENT_TYPE, "subject": subjects, "predicateType": kind, "predicate": predicate}
    plain: dict[str, Any] = json.loads(json.dumps(statement), parse_constant=str)  # JSON has no NaN: "NaN"
    return plain


def subjects_of(place: Storage, final: FinalManifest) -> list[dict[str, Any]]:
    """Return the files of a model and its manifest, by the digests of that manifest."""
    subjects = [descriptor(file.path, digest=recorded_digest(file)) for file in final.files]
    subjects.append(descriptor(MANIFEST, digest=digest_of(place, MANIFEST)))
    return subjects


def _moment(seconds: float | None) -> str | None:
    if not seconds:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _known(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in (None, "", [], ())}


def _attempts(run: Storage, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return each attempt of a run, oldest first, also one that never began to train."""
    starts = defaultdict[int, list[Row]](list)
    for row in rows:
        if row.get("kind") == "start":
            starts[row.get("attempt", 0)].append(row)
    numbers = sorted({*attempt_numbers(run), *starts})
    attempts = [_attempt(run.within(f"{ATTEMPTS}/{number}"), number, starts[number]) for number in numbers]
    for attempt in attempts[:-1]:
        if "ended" not in attempt:
            attempt.setdefault("fault", "no report")  # its nodes were killed
    return attempts


def _attempt(attempt: Storage, number: int, starts: Sequence[Row]) -> dict[str, Any]:
    platform: Any = None
    with suppress(DataError):
        platform = read_document(attempt).run.get("platform")
    settings = {name: (platform or {}).get(name) for name in _MACHINES}
    reports = node_reports(attempt, all_lives=True)
    begun = [*(report.started for report in reports), *(row.get("node_started") for row in starts)]
    return _known(
        {
            "attempt": number,
            "platform": settings.pop("kind"),
            **settings,
            "started": _moment(min(filter(None, begun), default=None)),
            "ended": _moment(max((report.ended for report in reports), default=None)),
            "machines": sorted({report.host for report in reports if report.host}),
            "fault": _fault(attempt, [report.fault for report in reports]),
            "starts": [_known({name: row.get(name) for name in _START}) for row in starts],
        }
    )


def _fault(attempt: Storage, faults: Iterable[str | None]) -> str | None:
    """Return why an attempt ended badly: by its diagnosis, or else by the first report of a node that failed."""
    with suppress(FileNotFoundError, DataError):
        content = attempt.read("diagnosis.json")
        diagnosis = parse_json(content, AttemptDiagnosis, where=attempt.address("diagnosis.json"), fix="")
        return diagnosis.code or str(diagnosis.fault)
    return next((str(fault) for fault in faults if fault is not None), None)


def _skipped(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the steps without an update, with the reason and the ids of their samples."""
    skips = {row["step"]: row for row in rows if row.get("kind") == "skip"}  # every attempt may report the same one
    return [_known({name: row.get(name) for name in ("step", "why", "windows")}) for _, row in sorted(skips.items())]


def _byproducts(run: Storage, place: str, final: FinalManifest, rows: Iterable[Row]) -> list[dict[str, Any]]:
    found = []
    for name in (METRICS, REPORT, SBOM, *(f"{place}/{name}" for name in (MODEL_BILL, CROISSANT, TEST_RESULT))):
        with suppress(FileNotFoundError):
            found.append(descriptor(name, digest=digest_of(run, name)))
    if final.chain is not None:
        columns = ("previous_chain", "weights_sha256", "batches_sha256")
        link = next((row for row in rows if row.get("chain_sha256") == final.chain), {})
        about = {"step": final.step, **_known({name: link.get(name) for name in columns})}
        found.append(descriptor("chain", digest={"sha256": final.chain}, annotations=about))
    return found


def _test(name: str, outcome: str, **figures: Any) -> dict[str, Any]:
    return {"name": name, "outcome": outcome, **_known(figures)}


def _logits(name: str, difference: float, tolerance: float, **figures: Any) -> dict[str, Any]:
    outcome = "FAILED"
    if difference <= tolerance:  # false for NaN
        outcome = "PASSED"
    return _test(name, outcome, difference=difference, tolerance=tolerance, **figures)


def _tests_of_collection(final: FinalManifest) -> list[dict[str, Any]]:
    tolerance, proof, trainer = final.logits_tolerance, final.huggingface, final.trainer_validation_loss
    loss = {"value": final.validation_loss, "samples": final.validation_windows, "trainer": trainer}
    transformers = _test("logits of transformers", "WARNED", why="; ".join(final.findings))
    if proof is not None:
        how = {"architecture": proof.architecture, "attention": proof.attention, "tokens": proof.tokens}
        transformers = _logits("logits of transformers", proof.logits_difference, tolerance, **how)
    return [
        _logits("logits of LitGPT", final.logits_difference, tolerance),
        _test("validation loss", "PASSED", **loss),
        _test("parameters", "PASSED", value=final.parameters),
        transformers,
    ]


def _scored(run: Storage, final: FinalManifest) -> dict[str, Evaluation]:
    """Return the evaluations of the model by their paths; of a moving average none, because it is not evaluated."""
    if final.average:
        return {}
    return evaluations_by_path(run, final.step)


def _tests_of_evaluation(run: Storage, final: FinalManifest) -> list[dict[str, Any]]:
    """Return each score; and a warning for each task of the config that has none."""
    tests, tasks = [], set[str]()
    for path, scored in _scored(run, final).items():
        tasks |= {*scored.settings.tasks}
        for score in scored.scores:
            figures = score.model_dump(mode="json", exclude={"task", "metric"})
            tests.append(_test(f"{score.task} {score.metric}", "PASSED", evaluation=path, **figures))
    settings: Any = read_document(run).run.get("evaluation")
    if settings and not final.average:
        missing = [task for task in settings["tasks"] if task not in tasks]
        tests += [_test(task, "WARNED", why="a task of the config without scores") for task in missing]
    return tests


def _configuration(run: Storage, final: FinalManifest) -> list[dict[str, Any]]:
    """Return the files that decided the results: the run's config, the validation split and each evaluation."""
    found = [descriptor(CONFIG, digest=digest_of(run, CONFIG))]
    for dataset, manifest in datasets_of(dataset_address(run, read_document(run).training.dataset)):
        files = files_of(dataset, manifest)
        found += [resource for record, resource in files if record in manifest.validation.files]
    for path, scored in _scored(run, final).items():
        found.append(descriptor(path, digest=digest_of(run, path), annotations={"versions": scored.versions}))
    return found
