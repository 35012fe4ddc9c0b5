"""The run index: what was started, by whom, how it ended; written once, and never passed over when it is damaged."""

import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from launcher.job import JobId, JobState, JobStatus
from launcher.platforms.local.settings import LocalPlatformConfig
from launcher.runs.attempts import Attempts, cancel_all
from launcher.runs.index import (
    INDEX,
    AttemptDiagnosis,
    AttemptRecord,
    DamagedRecords,
    Index,
    machine_below,
    this_machine,
)
from launcher.runs.listing import orphaned_resources, resolve_target, run_rows
from litgpt_demo.errors import DataError, FailureClass

RUN = "gpt-0123456789"
ENDED = JobStatus(state=JobState.FAILED, native="node 1 ended with 43")


def record(run: str = RUN, attempt: int = 1, *, user: str = "ada", created: float = 1.0) -> AttemptRecord:
    name, _, run_id = run.rpartition("-")
    return AttemptRecord(
        run=run, name=name, run_id=run_id, attempt=attempt, nonce="0a1b2c", config={}, platform={"kind": "local"},
        job_id=JobId(f"{run}-{attempt}"), directory=f"runs/{run}/attempts/{attempt}", user=user, host="laptop",
        machine=this_machine(), created=created,
    )  # fmt: skip


def diagnosis(number: int = 1, flow_run: str = "mine") -> AttemptDiagnosis:
    return AttemptDiagnosis(attempt=number, fault=FailureClass.NODE, before=0, after=number, flow_run=flow_run)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    monkeypatch.chdir(tmp_path)  # the records' directories are relative
    return Index.of(str(tmp_path))


def test_records_are_read_oldest_first_and_never_change(index: Index) -> None:
    for number in (10, 2, 1):
        assert index.create(record(attempt=number, created=float(number)))
    assert not index.create(record(user="grace"))
    assert [(stored.attempt, stored.user) for stored in index.records(RUN)] == [(1, "ada"), (2, "ada"), (10, "ada")]
    assert index.records("gpt-99") == []
    index.create(record("new-0123456789", created=11.0))
    assert [(newest.run, newest.attempt) for newest in index.newest()] == [("new-0123456789", 1), (RUN, 10)]


def test_end_and_diagnosis_are_stored_once(index: Index) -> None:
    index.create(record())
    index.record_end(record(), ENDED)
    index.record_end(record(), JobStatus(state=JobState.CANCELLED, native="cancelled"))
    assert {number: end.state for number, end in index.ends(RUN).items()} == {1: JobState.FAILED}
    diagnoses = [diagnosis(1), diagnosis(2, "another"), diagnosis(9), diagnosis(10)]
    for stored in diagnoses:
        index.create(record(attempt=stored.attempt))
        assert index.record_diagnosis(RUN, stored)
    assert not index.record_diagnosis(RUN, diagnosis(9, "too late"))
    assert index.diagnoses(RUN) == diagnoses
    assert index.diagnoses_of_flow_run(RUN, "mine") == [diagnoses[0], *diagnoses[2:]]
    assert index.diagnoses_of_flow_run(RUN, None) == []


def test_diagnosis_of_another_attempt_is_damaged(index: Index) -> None:
    """The next attempt has the number behind it: of a forged one that is a number that no record can have."""
    index.create(record())
    forged = diagnosis(1).model_copy(update={"attempt": 10**18})
    index.root.write(f"runs/{RUN}/attempts/1/diagnosis.json", forged.model_dump_json().encode())
    with pytest.raises(DataError, match=r"1/diagnosis\.json is of attempt 1000000000000000000; remove that file"):
        index.diagnoses(RUN)


def test_a_flow_run_is_followed_to_its_attempts_and_back(index: Index, tmp_path: Path) -> None:
    index.link_flow_run(["trial", "sweep"], record(RUN, 2))
    index.link_flow_run(["sweep"], record("gpt-9999999999", 1))
    index.link_flow_run(["sweep"], record(RUN, 3))
    (tmp_path / INDEX / "flow-runs" / "sweep" / RUN / "4x.json").write_text("{}")
    assert index.attempts_of_flow_run("sweep") == {RUN: 3, "gpt-9999999999": 1}
    assert index.attempts_of_flow_run("trial") == {RUN: 2}
    assert sorted(index.flow_runs_of_attempts()[RUN, 2]) == ["sweep", "trial"]
    assert index.runs() == [], "that a flow run follows it makes no attempt"


def test_damaged_record_is_named_with_the_effect_of_its_removal(index: Index, tmp_path: Path) -> None:
    """Passing over it would call a live job dead."""
    index.create(record())
    index.record_diagnosis(RUN, diagnosis())
    index.record_end(record(), ENDED)
    for path in (*(tmp_path / INDEX / RUN).iterdir(), tmp_path / f"runs/{RUN}/attempts/1/diagnosis.json"):
        path.write_text(path.read_text()[:40])
    with pytest.raises(DataError, match=r"1\.json is not a valid AttemptRecord .* check on the platform that the job"):
        index.records(RUN)
    with pytest.raises(DataError, match=r"remove that file; its attempt is then not counted"):
        index.diagnoses_of_flow_run(RUN, "mine")
    with pytest.raises(DataError, match=r"remove that file; the attempt.s end is then queried from its platform"):
        index.ends(RUN)


def test_damaged_record_stops_no_command_for_another_run(index: Index, tmp_path: Path) -> None:
    index.create(record())
    folder = tmp_path / INDEX
    for name, content in (("cut", b'{"format":'), ("forged", (folder / RUN / "1.json").read_bytes())):
        (folder / f"{name}-0123456789").mkdir()
        (folder / f"{name}-0123456789" / "1.json").write_bytes(content)
    (folder / RUN / f"{'9' * 200}.json").write_text("{}")
    newest = index.newest(bad := DamagedRecords())
    assert ([readable.run for readable in newest], len(bad)) == ([RUN], 2)
    assert [row.run for row in run_rows(index, bad=DamagedRecords())] == [RUN]
    assert resolve_target(RUN, root=str(tmp_path)).runs == (RUN,)
    for query in ("forged", "@last"):  # either may be the one that is meant
        with pytest.raises(DataError, match="2 records of the run index could not be read"):
            resolve_target(query, root=str(tmp_path))
    with pytest.raises(DataError, match=f"is of attempt 1 of {RUN}; check on the platform"):
        index.records("forged-0123456789")


FORGED = "forged-0123456789"
NUMBERS = ["abc", "", "-1", "0", "1_0", "99", "200000000", "9" * 5000, "\u0663", "1e3", "2&nodes=3"]
SCHEMES = {"slurm": "slurm://", "runai": "runai://team-a"}
VALUES: list[Any] = [
    None,
    True,
    -1,
    0.5,
    2**70,
    1e300,
    math.nan,
    math.inf,
    "",
    "\x00",
    "]",
    "200000000",
    [],
    {},
    [[[]]],
]
MEMBERS = [
    *AttemptRecord.model_fields,
    "platform.kind",
    "platform.nodes",
    "platform.processes_per_node",
    "platform.grace_period",
]


def forged_ids(kind: str) -> st.SearchStrategy[tuple[str, str, Any]]:
    hosts, queries = st.sampled_from(["", "[", "]", "x@"]), st.sampled_from(["nodes={}&kept=/tmp", "nodes={}", ""])
    ids = st.builds(lambda *of: (of[0] + "/name?" + of[1]).format(of[2]), hosts, queries, st.sampled_from(NUMBERS))
    numbers = st.sampled_from(NUMBERS).map(lambda number: f"/{FORGED}-1-0a1b2c?nodes={number}&kept={{directory}}")
    return st.tuples(st.just(kind), st.just("job_id"), st.one_of(ids, numbers).map(lambda end: SCHEMES[kind] + end))


FORGERIES = st.one_of(
    st.tuples(st.sampled_from(["local", *SCHEMES]), st.sampled_from(MEMBERS), st.sampled_from(VALUES)),
    *map(forged_ids, SCHEMES),
)


@example(("slurm", "job_id", f"slurm:///{FORGED}-1-0a1b2c?nodes=abc&kept={{directory}}"))
@example(("slurm", "job_id", f"slurm:///{FORGED}-1-0a1b2c?nodes=200000000&kept={{directory}}"))
@example(("runai", "job_id", f"runai://team-a/{FORGED}-1-0a1b2c?nodes=200000000&kept={{directory}}"))
@given(FORGERIES)
def test_no_forged_record_stops_a_verb_about_all_runs(forgery: tuple[str, str, Any]) -> None:
    """Neither a traceback nor an endless loop comes of one: the run is shown with its problem beside the others."""
    kind, member, value = forgery
    with TemporaryDirectory() as folder, patch.dict("os.environ", {"PATH": "/nowhere", "TRAIN_LITGPT_HOME": folder}):
        index = Index.of(folder)
        own = f"{folder}/runs/{RUN}/attempts/1"
        index.create(honest := record().model_copy(update={"directory": own, "job_id": own}))
        index.record_end(honest, ENDED)
        document = json.loads(record(FORGED).model_dump_json())
        document["directory"] = directory = f"{folder}/runs/{FORGED}/attempts/1"
        document |= {"platform": {"kind": kind, "project": "team-a"} if kind == "runai" else {"kind": kind}}
        document |= {"job_id": directory}
        section, _, name = member.rpartition(".")
        text = value.replace("{directory}", directory) if isinstance(value, str) else value
        (document[section] if section else document)[name] = text
        index.root.write(f"index/{FORGED}/1.json", json.dumps(document).encode())
        bad = DamagedRecords()
        rows = {row.run: row for row in run_rows(index, bad=bad)}
        assert rows.pop(RUN).state == "failed"
        assert [*rows, *bad] == [FORGED]
        assert resolve_target(RUN, root=folder).runs == (RUN,)
        assert {resource.run for resource in orphaned_resources(index)} <= {FORGED}
        cancelled, _ = cancel_all([Attempts(index=index, run=run) for run in index.runs()], log=print, patience=0)
        assert cancelled == []


@pytest.mark.parametrize("content", ['{"state": "gone"}', '{"state": "failed", "native": "x", "exit_codes": {"a": 1}}'])
def test_damaged_result_of_a_local_job_is_a_data_error(index: Index, content: str) -> None:
    place = f"runs/{RUN}/attempts/1"
    own = index.root.address(place)
    index.create(record().model_copy(update={"directory": own, "job_id": JobId(own)}))
    for name, text in (("submission.json", "{}"), ("result.json", content)):
        index.root.write(f"{place}/{name}", text.encode())
    (row,) = run_rows(index)
    assert (row.state, "result.json is not a valid" in row.note) == ("unknown", True)


IMAGE = {".dockerenv": "", "etc/machine-id": "0" * 32, "proc/sys/kernel/random/boot_id": "boot-1"}
CLONE = {"etc/machine-id": "0" * 32, "etc/hostname": "node1"}


@pytest.mark.parametrize(
    ("files", "others", "same"),
    [
        (CLONE, CLONE, True),
        (CLONE, CLONE | {"etc/hostname": "node2"}, False),
        (IMAGE | {"etc/hostname": "c1"}, IMAGE | {"etc/hostname": "c2"}, True),
        (IMAGE, IMAGE | {"proc/sys/kernel/random/boot_id": "boot-2"}, False),
        ({"etc/machine-id": "uninitialized"}, {"etc/machine-id": "uninitialized"}, False),
    ],
    ids=["same machine", "cloned machine", "containers of one host", "one image on two hosts", "uninitialized"],
)
def test_two_machines_have_two_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], others: dict[str, str], *, same: bool
) -> None:
    """The jobs of a machine are processes and locks there, which another one cannot see."""
    found = []
    for name, content in (("a", files), ("b", others)):
        monkeypatch.setattr("socket.gethostname", lambda name=name: name)
        monkeypatch.setattr("uuid.getnode", lambda: 0x0242AC110002)  # as every first container of Docker has it
        for path, text in content.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_text(text)
        found.append(machine_below(tmp_path / name))
    assert (found[0] == found[1]) == same


def test_platform_is_opened_once_for_all_questions_of_a_verb(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening may log in, run a program or read a kubeconfig."""
    runs = [f"gpt-{number:010}" for number in range(3)]
    for run in runs:
        own = index.root.address(f"runs/{run}/attempts/1")
        index.create(record(run).model_copy(update={"directory": own, "job_id": JobId(own)}))
    opened, own_open = list[str](), LocalPlatformConfig.open
    monkeypatch.setattr(LocalPlatformConfig, "open", lambda self: opened.append(self.kind) or own_open(self))
    attempts = Attempts(index=index, run=runs[0])
    for verb in (lambda: [attempts.last(), attempts.all(), attempts.cancel()], lambda: run_rows(index)):
        opened.clear()
        assert verb()
        assert opened == ["local"]


def test_a_record_whose_logs_would_be_elsewhere_is_damaged(index: Index) -> None:
    for number, elsewhere in enumerate(("/etc", "gs://another-bucket/runs", f"runs/{RUN}/attempts/9"), start=1):
        run = f"gpt-{number:010}"
        index.create(record(run).model_copy(update={"directory": elsewhere}))
        with pytest.raises(DataError, match=r"1\.json says that its logs and reports are in .*remove that file"):
            index.records(run)
