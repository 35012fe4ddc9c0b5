from __future__ import annotations

import json
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest

from launcher.job import JobId, JobState, JobStatus
from launcher.runs.index import (
    INDEX,
    AttemptRecord,
    AttemptVerdict,
    Index,
    damaged_records,
    platform_of,
    root_of,
    this_machine,
)
from launcher.runs.listing import run_rows
from launcher.runs.targets import find
from litgpt_demo.errors import DataError, Fault


def record(
    run: str = "gpt-0123456789", attempt: int = 1, *, user: str = "ada", created: float = 1.0, sweep: str | None = None
) -> AttemptRecord:
    return AttemptRecord(
        run=run,
        name=run.rpartition("-")[0],
        key=run.rpartition("-")[2],
        attempt=attempt,
        config={},
        platform={"kind": "local"},
        job_id=JobId(f"{run}-{attempt}"),
        directory=f"runs/{run}/attempts/{attempt}",
        user=user,
        host="laptop",
        machine=this_machine(),
        created=created,
        sweep=sweep,
    )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    monkeypatch.chdir(tmp_path)  # the records' directories are relative
    return Index.of(str(tmp_path))


def test_what_was_started_is_read_back_oldest_first(index: Index) -> None:
    written = [record(attempt=number) for number in (1, 2, 10)]
    for one in reversed(written):
        assert index.create(one)
    assert index.records("gpt-0123456789") == written
    assert index.records("gpt-99") == []


def test_an_attempts_number_is_given_once_and_its_record_never_changed(index: Index) -> None:
    first = record(user="ada")
    assert index.create(first)
    assert not index.create(record(user="grace"))
    assert index.records(first.run) == [first]


def test_of_many_who_claim_a_number_at_once_one_gets_it(index: Index) -> None:
    claims, won, together = [record(user=f"user-{number}") for number in range(16)], [], Barrier(16)

    def claim(mine: AttemptRecord) -> None:
        together.wait()
        if index.create(mine):
            won.append(mine)

    threads = [Thread(target=claim, args=(mine,)) for mine in claims]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert index.records("gpt-0123456789") == won


def test_the_newest_run_comes_first_with_its_last_attempt(index: Index) -> None:
    index.create(record("old-0123456789", 1, created=1.0))
    index.create(record("old-0123456789", 2, created=2.0))
    index.create(record("new-0123456789", 1, created=3.0))
    assert [(one.run, one.attempt) for one in index.newest()] == [("new-0123456789", 1), ("old-0123456789", 2)]
    assert index.runs() == ["new-0123456789", "old-0123456789"]


def test_an_end_is_written_once_by_who_saw_it_first(index: Index) -> None:
    one = record()
    index.create(one)
    assert index.ends(one.run) == {}
    index.end(one, JobStatus(state=JobState.FAILED, native="node 1 ended with 43"))
    index.end(one, JobStatus(state=JobState.CANCELLED, native="cancelled"))
    assert {number: end.state for number, end in index.ends(one.run).items()} == {1: JobState.FAILED}
    assert index.records(one.run) == [one]


def test_a_flow_run_is_followed_to_its_attempts_and_back(index: Index) -> None:
    index.follow(["trial", "sweep"], record("gpt-0123456789", 2))
    index.follow(["sweep"], record("gpt-9999999999", 1))
    index.follow(["sweep"], record("gpt-0123456789", 3))
    assert index.followed_by("sweep") == {"gpt-0123456789": 3, "gpt-9999999999": 1}
    assert index.followed_by("trial") == {"gpt-0123456789": 2}
    assert index.followed_by("nobody") == {}
    assert sorted(index.followers()["gpt-0123456789", 2]) == ["sweep", "trial"]
    assert index.runs() == [], "that a flow run follows it makes no attempt"


def test_verdicts_are_read_back_oldest_first_by_the_flow_run_that_gave_them(index: Index) -> None:
    def judge(number: int, flow_run: str) -> AttemptVerdict:
        given = AttemptVerdict(attempt=number, fault=Fault.NODE, before=0, after=number, flow_run=flow_run)
        index.judge("gpt-0123456789", given)
        return given

    judged = {number: judge(number, "mine" if number != 2 else "another") for number in (10, 9, 2, 1)}
    judge(9, "too late")
    assert index.verdicts("gpt-0123456789", "mine") == [judged[1], judged[9], judged[10]]
    assert index.verdicts("gpt-0123456789", None) == index.verdicts("gpt-9999999999", "mine") == []
    assert index.ends("gpt-0123456789") == {}
    assert index.runs() == [], "a verdict makes no attempt"


def test_each_request_to_cancel_is_a_new_one(index: Index) -> None:
    before = index.cancellations("gpt-0123456789")
    index.request_cancel("gpt-0123456789")
    between = index.cancellations("gpt-0123456789")
    index.request_cancel("gpt-0123456789")
    assert len(before) == 0
    assert len(between - before) == 1
    assert len(index.cancellations("gpt-0123456789") - between) == 1
    assert index.runs() == []


def test_a_damaged_record_is_named_and_not_passed_over(index: Index, tmp_path: Path) -> None:
    """Passing over it would call a live job dead."""
    index.create(record())
    path = tmp_path / INDEX / "gpt-0123456789" / "1.json"
    path.write_text(path.read_text()[:40])
    with pytest.raises(DataError, match=r"1\.json is not a valid AttemptRecord .* look for the job on its platform"):
        index.records("gpt-0123456789")


def test_a_damaged_or_forged_record_stops_no_verb_about_another_run(index: Index, tmp_path: Path) -> None:
    index.create(record())
    folder = tmp_path / INDEX
    (folder / "cut-0123456789").mkdir()
    (folder / "cut-0123456789" / "1.json").write_text('{"format":')
    (folder / "forged-0123456789").mkdir()
    (folder / "forged-0123456789" / "1.json").write_bytes((folder / "gpt-0123456789" / "1.json").read_bytes())
    (folder / "gpt-0123456789" / f"{'9' * 200}.json").write_text("{}")
    bad = damaged_records()
    assert [one.run for one in index.newest(bad)] == ["gpt-0123456789"]
    assert bad.count == 2
    assert [row.run for row in run_rows(index, bad=damaged_records())] == ["gpt-0123456789"]
    assert find("gpt-0123456789", root=str(tmp_path)).runs == ("gpt-0123456789",)
    for words in ("forged", "@last"):  # either may be the one that is meant
        with pytest.raises(DataError, match="2 records of the run index could not be read"):
            find(words, root=str(tmp_path))
    with pytest.raises(DataError, match="is of attempt 1 of gpt-0123456789; whether its job runs cannot be known"):
        index.records("forged-0123456789")


@pytest.mark.parametrize(
    "change", [{"fault": "cancelled"}, {"fault": "platform unreachable"}, {"before": -1}, {"after": 2**60}]
)
def test_a_verdict_that_no_attempt_can_have_is_refused_with_its_file(
    index: Index, tmp_path: Path, change: dict[str, Any]
) -> None:
    index.judge(record().run, AttemptVerdict(attempt=1, fault=Fault.NODE, before=0, after=1, flow_run="mine"))
    path = tmp_path / INDEX / "gpt-0123456789" / "1.verdict.json"
    judged = index.verdicts("gpt-0123456789", "mine")[0].model_dump(mode="json")
    path.write_text(json.dumps({**judged, **change}))
    with pytest.raises(DataError, match=rf"1\.verdict\.json is not a valid AttemptVerdict .* at {next(iter(change))}"):
        index.verdicts("gpt-0123456789", "mine")


def test_a_damaged_verdict_or_end_says_what_its_removal_means(index: Index, tmp_path: Path) -> None:
    index.create(record())
    index.judge(record().run, AttemptVerdict(attempt=1, fault=Fault.NODE, before=0, after=1, flow_run="mine"))
    index.end(record(), JobStatus(state=JobState.FAILED, native="node 0 ended with 43"))
    for path in (tmp_path / INDEX / "gpt-0123456789").glob("1.*.json"):
        path.write_text(path.read_text()[:40])
    with pytest.raises(DataError, match=r"remove that file; its attempt is then not counted"):
        index.verdicts("gpt-0123456789", "mine")
    with pytest.raises(DataError, match=r"remove that file; the platform is then asked how the attempt ended"):
        index.ends("gpt-0123456789")


@pytest.mark.parametrize(
    "elsewhere", ["/etc", "gs://another-bucket/runs", "s3://a/b", "runs/gpt-0123456789/attempts/2"]
)
def test_a_record_whose_logs_would_be_elsewhere_is_damaged(index: Index, elsewhere: str) -> None:
    index.create(record().model_copy(update={"directory": elsewhere}))
    with pytest.raises(DataError, match=r"1\.json says that its logs and reports are in .*remove that file"):
        index.records("gpt-0123456789")
    assert index.newest(bad := damaged_records()) == []
    assert bad.count == 1


def test_a_root_that_is_reached_by_another_path_has_the_same_records(index: Index, tmp_path: Path) -> None:
    index.create(record())
    (link := tmp_path / "link").symlink_to(tmp_path)
    for address in (str(link), ".", f"{tmp_path}/index/.."):
        assert [one.run for one in Index.of(address).records("gpt-0123456789")] == ["gpt-0123456789"]


def test_files_of_other_names_in_the_index_are_no_flow_runs(index: Index, tmp_path: Path) -> None:
    index.follow(["0a"], record())
    for path in ("x.json", "0a/x/y.json", "0a/gpt-0123456789/1x.json"):
        stray = tmp_path / INDEX / "flow-runs" / path
        stray.parent.mkdir(parents=True, exist_ok=True)
        stray.write_text("{}")
    assert index.followers() == {("gpt-0123456789", 1): ("0a",)}
    assert index.followed_by("0a") == {"gpt-0123456789": 1}


@pytest.mark.parametrize(
    ("parameters", "root"),
    [({}, "output"), ({"root": "gs://b/p"}, "gs://b/p"), ({"root": "x", "overrides": {"root": "y"}}, "y")],
)
def test_a_flow_runs_parameters_say_where_it_writes(parameters: dict[str, Any], root: str) -> None:
    assert root_of(parameters) == root


def test_a_flow_runs_parameters_say_which_platform_it_was_started_with() -> None:
    section = {"kind": "runai", "project": "a", "url": "https://a.example"}
    given = platform_of({"platform": section, "overrides": {"platform.url": "https://b.example", "train.seed": 2}})
    assert getattr(given, "url", None) == "https://b.example"
    assert platform_of({"platform": {"kind": "none such"}}) is platform_of({}) is None
