"""The process that scores a model: its class of failure, its output, its end, and who may run it."""

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import until

from launcher.events import Event, Listener, Note, StepProgress
from launcher.runs.lease import FolderLease
from litgpt_demo.config import EvaluationConfig
from litgpt_demo.data.hub import can_reach_hub
from litgpt_demo.documents import FileRecord, write_manifest
from litgpt_demo.errors import EXIT_CODES, FailureClass, TrainLitgptError, UserError
from litgpt_demo.export import FinalManifest, HuggingFaceProof, exported
from litgpt_demo.export import evaluation as scoring
from litgpt_demo.export.evaluation import Evaluation, evaluations, place_of, read_evaluation
from litgpt_demo.storage import Storage, open_storage
from tasks.evaluation import _alone, _evaluated, evaluate
from tasks.processes import Child

ASKED = EvaluationConfig(tasks=("words",))
PLACE = place_of(8, ASKED)
SECRET = "known-secret"


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "run"))


def test_failed_evaluation_keeps_its_class_with_its_output(
    run: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine does not reach the Hub, and a secret of its environment is printed."""
    bar = r"printf 'Running loglikelihood:  50%%|##  | 5/10\rRunning loglikelihood: 100%%|###| 10/10\r'"
    lines = f"echo $asked offline=$HF_HUB_OFFLINE {SECRET}\n{bar}\necho 'OutOfMemoryError: no room'\n{bar}\nexit 42"
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nread -r asked\n{lines}\n")
    program.chmod(0o755)
    monkeypatch.setenv("MY_TOKEN", SECRET)
    monkeypatch.setattr("tasks.evaluation.PYTHON", (str(program),))
    monkeypatch.setattr("tasks.evaluation.can_reach_hub", lambda: False)
    events = list[Event]()
    with Listener(events.append), pytest.raises(TrainLitgptError) as failed:
        asyncio.run(_evaluated(run, ASKED, PLACE, parameters=1))
    log = PLACE.replace(".json", ".log")
    assert failed.value.fault is FailureClass.OUT_OF_MEMORY
    error = "OutOfMemoryError: no room"
    assert str(failed.value) == f"out of memory: {error}; all that it printed is in {run.address(log)}"
    assert run.read(log).decode() == f"{ASKED.model_dump_json()} offline=1 [secure]\n{error}\n"
    assert [entry.fraction for entry in events if isinstance(entry, StepProgress)][:2] == [0.5, 1.0]
    assert any("the Hugging Face Hub cannot be reached" in entry.what for entry in events if isinstance(entry, Note))
    assert evaluations(run) == []


def test_a_model_larger_than_the_memory_is_not_scored(run: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.evaluation.gpu_names", list)
    monkeypatch.setattr("tasks.evaluation.host_memory", lambda: 4 << 30)
    with pytest.raises(UserError, match=r"take 28.0 GB in float32, but this machine has 4.29 GB.* train-litgpt eval"):
        asyncio.run(_evaluated(run, ASKED, PLACE, parameters=7_000_000_000))


def test_evaluation_of_no_run_makes_no_folder(run: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.evaluation.check_evaluation", lambda _: ())
    with pytest.raises(UserError, match="does not exist"):
        asyncio.run(evaluate.fn(run.address(), ASKED))
    assert not Path(run.address()).exists()


def test_a_run_has_one_evaluation_at_a_time(run: Storage) -> None:
    """The second says whose end it waits for."""
    events = list[Event]()

    async def scene() -> None:
        with FolderLease(run.within("evaluations/lease")) as first:
            assert first.take()
            second = asyncio.create_task(_alone(run).__aenter__())
            await asyncio.to_thread(until, lambda: events)
            assert not second.done()
        await second

    with Listener(events.append):
        asyncio.run(scene())
    [note] = events
    assert isinstance(note, Note)
    assert f"is evaluating {run.address()}" in note.what


def test_a_child_ends_with_its_parent() -> None:
    """A parent that is killed closes its end of the pipe, and no more."""
    code = "import threading; from litgpt_demo.parent import follow_parent; follow_parent(); threading.Event().wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait() == 1


def test_a_child_that_works_keeps_no_thread_of_the_event_loop() -> None:
    async def scene() -> str:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        child = Child(["/bin/sh", "-c", "read -r word; echo $word"], environ={})
        lines = list[str]()
        ends = asyncio.create_task(child.end(lambda: True, on_line=lines.append))
        await asyncio.to_thread(child.write, "done")
        await ends
        return lines[0]

    assert asyncio.run(scene()) == "done"


class OutOfMemoryError(RuntimeError):
    """As torch has it."""


@pytest.mark.parametrize(
    ("error", "fault", "last"),
    [
        (OutOfMemoryError("no room"), FailureClass.OUT_OF_MEMORY, "OutOfMemoryError: no room"),
        (KeyError("gold"), FailureClass.USER, "KeyError: 'gold'"),
        (UserError("no such task", fix="name another"), FailureClass.USER, "no such task; name another"),
    ],
)
def test_scorer_exits_with_the_class_of_its_error(
    error: Exception,
    fault: FailureClass,
    last: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> Evaluation:
        raise error

    lines = SimpleNamespace(get=lambda: ASKED.model_dump_json())
    monkeypatch.setattr("litgpt_demo.export.evaluation.follow_parent", lambda: lines)
    monkeypatch.setattr("litgpt_demo.export.evaluation.evaluate", fail)
    assert scoring.main(["run"]) == EXIT_CODES[fault]
    assert capsys.readouterr().out.splitlines()[-1] == last


def test_empty_choice_is_named_with_its_task() -> None:
    requests = [
        SimpleNamespace(request_type="loglikelihood", args=("She said", choice), idx=number, doc_id=1)
        for number, choice in enumerate([" yes", ""])
    ]
    problem = scoring._empty_choice({"words": SimpleNamespace(instances=requests)})
    assert str(problem).startswith("evaluation.tasks: choice 2 of sample 2 of words is empty; ")


def test_unreachable_hub_is_detected_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the discard port, where nobody listens
    assert not can_reach_hub()


def test_scores_go_on_the_card_of_the_newest_manifest(run: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scoring takes hours, in which another command may collect the run again."""
    proof = HuggingFaceProof(architecture="A", attention="sdpa", logits_difference=0.0, tokens=1, sample="")
    card = FileRecord.of(run.within("final").write("MODEL_CARD.md", b"# gpt\n\n## Use\n"))
    final = FinalManifest(
        run="gpt", step=8, tokens=1, parameters=1, dataset_hash="d", validation_loss=1.0, perplexity=2.7,
        validation_windows=1, logits_difference=0.0, logits_tolerance=0.1, huggingface=proof, prompt="", sample="",
        files=(card,),
    )  # fmt: skip
    write_manifest(run.within("final"), final)

    async def score(*_: object, **__: object) -> Evaluation:
        write_manifest(run.within("final"), final.model_copy(update={"tokens": 2}))
        return Evaluation(step=8, settings=ASKED, scores=(), versions={})

    async def show(*_: object, **__: object) -> None:
        pass

    for name, value in {"_evaluated": score, "acreate_table_artifact": show, "check_evaluation": lambda _: ()}.items():
        monkeypatch.setattr(f"tasks.evaluation.{name}", value)
    run.within("final").write("provenance.intoto.json", b"of the model without scores")
    stated = list[FinalManifest | None]()
    monkeypatch.setattr("tasks.evaluation.write_statements", lambda run: stated.append(exported(run)))
    asyncio.run(evaluate.fn(run.address(), ASKED))
    made = exported(run)
    assert stated == [made], "the statements are about the new card"
    assert made is not None
    assert made.tokens == 2
    [record] = made.files
    card = run.read("final/MODEL_CARD.md")
    assert (record.size, record.sha256) == (len(card), sha256(card).hexdigest())


def test_files_beside_the_scores_are_no_scores(run: Storage) -> None:
    run.write("evaluations/0123456789.log", b"its output\n")
    run.write("evaluations/lease/1.json", b"{}")
    assert evaluations(run) == []
    assert read_evaluation(run, PLACE) is None
