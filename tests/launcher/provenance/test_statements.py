"""Statements of a run: what its model was made from, how, and what was proved, in formats of others."""

import json
import re
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from training_runs import NewRun, train

from launcher.provenance import statements
from launcher.provenance.dependencies import dependencies_of
from launcher.provenance.statements import PROVENANCE, TEST_RESULT, write_statements
from litgpt_demo.config import EvaluationConfig
from litgpt_demo.documents import FileRecord, write_manifest
from litgpt_demo.errors import UserError
from litgpt_demo.export import FinalManifest, HuggingFaceProof
from litgpt_demo.export.evaluation import Evaluation, Score
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.training.checkpoints import list_complete
from litgpt_demo.training.origins import find_initial_weights

PROOF = HuggingFaceProof(
    architecture="LlamaForCausalLM", attention="sdpa", logits_difference=2e-6, tokens=32, sample="once upon"
)
WEIGHTS = b"the weights"
LOCAL = {"kind": "local", "nodes": 1, "processes_per_node": 1}
GKE = {"kind": "gke", "machine": "a3-highgpu-8g", "nodes": 2, "processes_per_node": 8}


def collected(folder: Path, **changes: Any) -> Storage:
    """A trained run with a model, as far as statements read it."""
    run, spec = open_storage(str(folder)), json.loads((folder / "config.json").read_text())["training"]
    [*_, last] = sorted(list_complete(run), key=lambda manifest: manifest.step)
    final = run.within("final")
    stored = FileRecord.of(final.write("litgpt/lit_model.pth", WEIGHTS), sha256=sha256(WEIGHTS).hexdigest())
    fields = {
        "run": spec["run"], "step": last.step, "tokens": last.tokens, "chain": last.link and last.link.chain,
        "parameters": 100, "dataset_hash": spec["dataset_hash"], "validation_loss": 3.5, "perplexity": 33.1,
        "validation_windows": 7, "logits_difference": 1e-6, "logits_tolerance": 1e-4, "huggingface": PROOF,
        "prompt": "", "sample": "", "files": (stored,),
    }  # fmt: skip
    write_manifest(final, FinalManifest.model_validate(fields | changes))
    return run


@pytest.fixture
def run(finished_copy: Path) -> Storage:
    return collected(finished_copy)


def write_attempt(run: Storage, number: int, platform: dict[str, Any], *, ranks: int, start: float, **end: Any) -> None:
    """The files of an attempt, whose one node began at `start` and ran for 100 s."""
    place, document = run.within(f"attempts/{number}"), json.loads(run.read("config.json"))
    document["training"]["world_size"] = ranks
    software = {"image": f"r.test/litgpt@sha256:{str(number) * 64}", "commit": "70af7e1", "dirty": False}
    document |= {"run": {"name": "poems", "platform": platform}, "software": software}
    place.write("config.json", json.dumps(document).encode())
    report = {"node": 0, "exit_code": 0, "fault": None, "message": "", "started": start, "ended": start + 100}
    place.write("node-0.json", json.dumps(report | {"host": f"machine-{number}"} | end).encode())


def named(resources: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {resource["name"]: resource for resource in resources}


def dependencies(run: Storage) -> dict[str, dict[str, Any]]:
    definition = statements.provenance_of(run)["predicate"]["buildDefinition"]
    return named(definition["resolvedDependencies"])


def internal(run: Storage) -> dict[str, Any]:
    return statements.provenance_of(run)["predicate"]["buildDefinition"]["internalParameters"]  # type: ignore[no-any-return]


def require_statement(statement: dict[str, Any]) -> None:
    """By the text of the in-toto specification, v1.2."""
    assert statement.keys() == {"_type", "subject", "predicateType", "predicate"}
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    for subject in statement["subject"]:
        assert subject["name"]
        assert re.fullmatch("[0-9a-f]{64}", subject["digest"]["sha256"])
    names = [subject["name"] for subject in statement["subject"]]
    assert len(names) == len(set(names)) > 0


def require_resource(resource: dict[str, Any]) -> None:
    fields = {"name", "uri", "digest", "content", "downloadLocation", "mediaType", "annotations"}
    assert resource.keys() <= fields
    assert {"uri", "digest", "content"} & resource.keys(), resource
    assert re.match(r"[a-z][a-z0-9+.-]*:", resource.get("uri", "file:"))
    widths = {"sha256": (64,), "crc32c": (8,), "gitCommit": (7, 40, 64), "gitBlob": (40,)}
    for algorithm, value in resource.get("digest", {}).items():
        assert len(value) in widths[algorithm]
        assert re.fullmatch("[0-9a-f]+", value)


def test_provenance_is_slsa_v1(run: Storage) -> None:
    """By the text of https://slsa.dev/spec/v1.2/build-provenance."""
    write_attempt(run, 1, LOCAL, ranks=1, start=1e9)
    statement = statements.provenance_of(run)
    require_statement(statement)
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    assert statement["predicate"].keys() == {"buildDefinition", "runDetails"}
    definition, details = statement["predicate"]["buildDefinition"], statement["predicate"]["runDetails"]
    assert definition.keys() == {"buildType", "externalParameters", "internalParameters", "resolvedDependencies"}
    assert definition["externalParameters"].keys() == {"run", "training"}
    assert details.keys() == {"builder", "metadata", "byproducts"}
    assert details["builder"]["id"].startswith("https://")
    times = {"startedOn": "2001-09-09T01:46:40Z", "finishedOn": "2001-09-09T01:48:20Z"}
    assert details["metadata"] == {"invocationId": "finished", **times}
    for resource in (*definition["resolvedDependencies"], *details["byproducts"]):
        require_resource(resource)


def test_pages_define_the_build_type_with_every_field(run: Storage) -> None:
    address, _, section = statements.BUILD_TYPE.partition("/blob/main/")[2].partition("#")
    page = Path(__file__).parents[3].joinpath(address).read_text("utf-8")
    titles = re.findall(r"^##+ (.+)", page, re.MULTILINE)
    sections = [title.lower().replace(" ", "-") for title in titles]
    assert {section, statements.BUILDER.partition("#")[2]} <= set(sections)
    write_attempt(run, 1, LOCAL, ranks=1, start=1e9, fault="node fault", exit_code=43)
    write_attempt(run, 2, GKE, ranks=16, start=2e9)
    fields = internal(run)
    names = {*fields, *fields["attempts"][0], *fields["attempts"][1], *fields["attempts"][0]["starts"][0]}
    assert {name for name in names if f"`{name}`" not in page} == set()


def test_subjects_are_the_files_of_the_model_with_its_manifest(run: Storage) -> None:
    subjects = named(statements.provenance_of(run)["subject"])
    assert subjects["litgpt/lit_model.pth"]["digest"] == {"sha256": sha256(WEIGHTS).hexdigest()}
    assert subjects["manifest.json"]["digest"] == {"sha256": sha256(run.read("final/manifest.json")).hexdigest()}
    assert len(subjects) == 2


def test_dependencies_are_dataset_tokenizer_and_software(run: Storage, tiny_dataset: Path) -> None:
    write_attempt(run, 1, LOCAL, ranks=1, start=1e9)
    found = dependencies(run)
    for name in ("train.bin", "val.bin", "manifest.json", "tokenizer/tokenizer.json"):
        content = (tiny_dataset / name).read_bytes()
        assert found[f"datasets/{tiny_dataset.name}/{name}"]["digest"] == {"sha256": sha256(content).hexdigest()}
    assert found["image r.test/litgpt"]["digest"] == {"sha256": "1" * 64}
    assert found["source train-litgpt"]["digest"] == {"gitCommit": "70af7e1"}


def test_dependencies_have_every_file_of_a_mixture(new_run: NewRun, mixed: tuple[dict[str, Any], Path]) -> None:
    """The manifest of the mixture, and the files of both of its sources."""
    folder, dataset = new_run("mixed", dataset=mixed[1]), mixed[1]
    found = named(dependencies_of(open_storage(str(folder))))
    files = {f"datasets/{path.relative_to(dataset.parent)}" for path in dataset.parent.rglob("*") if path.is_file()}
    assert {name for name in found if name.startswith("datasets/")} == {file for file in files if "/." not in file}
    assert len({name.split("/")[1] for name in found if name.endswith("/train.bin")}) == 2


def test_byproducts_are_metrics_and_the_end_of_the_chain(run: Storage) -> None:
    made = statements.provenance_of(run)["predicate"]["runDetails"]["byproducts"]
    found, last = named(made), list_complete(run)[0].link
    assert found["metrics.jsonl"]["digest"] == {"sha256": sha256(run.read("metrics.jsonl")).hexdigest()}
    assert last is not None
    assert found["chain"]["digest"] == {"sha256": last.chain}
    assert found["chain"]["annotations"]["weights_sha256"] == last.weights
    assert found.keys() == {"metrics.jsonl", "chain"}, "no file that the run does not have"


def test_restarts_with_their_faults_are_told(run: Storage) -> None:
    write_attempt(run, 1, LOCAL, ranks=1, start=1e9, fault="node fault", exit_code=43)
    diagnosis = {"attempt": 2, "code": "cuda.oom", "fault": "out of memory", "before": 0, "after": 4}
    write_attempt(run, 2, LOCAL, ranks=1, start=2e9)
    run.write("attempts/2/diagnosis.json", json.dumps(diagnosis).encode())
    write_attempt(run, 3, LOCAL, ranks=1, start=3e9)
    with Path(run.address("metrics.jsonl")).open("a") as metrics:
        metrics.write('{"kind": "start", "step": 4, "attempt": 3, "world_size": 1, "device": "cpu"}\n')
        metrics.write('{"kind": "skip", "step": 5, "why": "the loss of step 5 is nan", "windows": [7]}\n')
        metrics.write('{"kind": "skip", "step": 13, "why": "after the model", "windows": [8]}\n')
    found = internal(run)
    first, second, third = (attempt for attempt in found["attempts"] if attempt["attempt"])
    assert (first["fault"], second["fault"], third.get("fault")) == ("node fault", "cuda.oom", None)
    assert (third["starts"][0]["step"], third["machines"]) == (4, ["machine-3"])
    assert found["skippedSteps"] == [{"step": 5, "why": "the loss of step 5 is nan", "windows": [7]}]


def test_moves_to_other_platforms_or_node_counts_are_told(run: Storage) -> None:
    write_attempt(run, 1, LOCAL, ranks=1, start=1e9)
    write_attempt(run, 2, LOCAL | {"nodes": 2}, ranks=2, start=2e9)
    write_attempt(run, 3, GKE, ranks=16, start=3e9)
    write_attempt(run, 4, GKE, ranks=16, start=4e9)
    attempts = [attempt for attempt in internal(run)["attempts"] if attempt["attempt"]]
    names = ("platform", "machine", "nodes", "processes_per_node")
    assert [tuple(attempt.get(name) for name in names) for attempt in attempts] == [
        ("local", None, 1, 1), ("local", None, 2, 1), *[("gke", "a3-highgpu-8g", 2, 8)] * 2
    ]  # fmt: skip


def test_all_software_of_a_run_is_told(run: Storage) -> None:
    """An attempt may have had another image."""
    for number in (1, 2):
        write_attempt(run, number, LOCAL, ranks=1, start=1e9)
    made = statements.provenance_of(run)["predicate"]["buildDefinition"]["resolvedDependencies"]
    images = [resource["digest"]["sha256"][0] for resource in made if resource["name"].startswith("image")]
    assert images == ["1", "2"]


def test_continued_model_states_its_ancestors(new_run: NewRun, finished_copy: Path) -> None:
    """Weights of a run, with its chain and samples, and the software and data of that run."""
    finished, document = finished_copy, json.loads((finished_copy / "config.json").read_text())
    software = {"commit": "70af7e1", "dirty": False, "image": None, "packages": {}}
    (finished / "config.json").write_text(json.dumps(document | {"software": software}))
    origin = find_initial_weights(str(finished), optimizer=False, root="none")
    folder = new_run("child", origin=origin, max_steps=2, warmup_steps=0)
    train(folder)
    found = dependencies(collected(folder))
    [weights] = [resource for name, resource in found.items() if name.endswith("step-00000012/manifest.json")]
    parent = list_complete(open_storage(str(finished)))[0]
    assert parent.link is not None
    assert weights["annotations"]["link"]["chain_sha256"] == parent.link.chain
    assert (weights["annotations"]["run"], weights["annotations"]["step"]) == ("finished", 12)
    assert weights["annotations"]["trainedOn"][0]["samples"] == 12 * 8
    commit = found["source train-litgpt"]
    assert (commit["digest"], commit["annotations"]["run"]) == ({"gitCommit": "70af7e1"}, "finished")
    manifest = (finished / "checkpoints/step-00000012/manifest.json").read_bytes()
    assert weights["digest"] == {"sha256": sha256(manifest).hexdigest()}


def test_same_files_give_the_same_bytes(run: Storage) -> None:
    first = write_statements(run)
    written = [Path(run.address(record.path)).stat().st_mtime_ns for record in first]
    assert [record.path for record in first[-2:]] == [f"final/{TEST_RESULT}", f"final/{PROVENANCE}"]
    assert write_statements(run) == first
    assert [Path(run.address(record.path)).stat().st_mtime_ns for record in first] == written, "nor are they touched"
    copy = open_storage(str(shutil.copytree(run.address(), f"{run.address()}-copy")))
    assert [record.sha256 for record in write_statements(copy)] == [record.sha256 for record in first]


def test_moving_average_has_statements_of_its_own(run: Storage) -> None:
    shutil.copytree(run.address("final"), run.address("final-average"))
    paths = [record.path for record in write_statements(run, "final-average")]
    assert f"final-average/{PROVENANCE}" in paths
    assert not run.exists(f"final/{PROVENANCE}")
    made = statements.provenance_of(run, "final-average")["predicate"]["runDetails"]["byproducts"]
    assert f"final-average/{TEST_RESULT}" in named(made)


def test_results_have_every_proof_of_the_collection(run: Storage) -> None:
    statement = statements.test_result_of(run)
    require_statement(statement)
    predicate = statement["predicate"]
    assert statement["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    assert predicate["result"] == "PASSED"
    proofs = ["logits of LitGPT", "validation loss", "parameters", "logits of transformers"]
    assert (predicate["passedTests"], predicate["warnedTests"], predicate["failedTests"]) == (proofs, [], [])
    for resource in predicate["configuration"]:
        require_resource(resource)
    names = [resource["name"].rpartition("/")[2] for resource in predicate["configuration"]]
    assert names == ["config.json", "val.bin"]
    loss = next(test for test in predicate["trainlitgpt_tests"] if test["name"] == "validation loss")
    assert loss == {"name": "validation loss", "outcome": "PASSED", "value": 3.5, "samples": 7}


@pytest.mark.parametrize(
    ("changes", "result", "tests"),
    [
        (
            {"huggingface": None, "findings": ("no architecture",)},
            "WARNED",
            {"warnedTests": ["logits of transformers"]},
        ),
        ({"logits_difference": 1e-3}, "FAILED", {"failedTests": ["logits of LitGPT"]}),
    ],
    ids=["absent", "above the tolerance"],
)
def test_result_without_a_proof_has_not_passed(
    finished_copy: Path, changes: dict[str, Any], result: str, tests: dict[str, list[str]]
) -> None:
    predicate = statements.test_result_of(collected(finished_copy, **changes))["predicate"]
    assert predicate["result"] == result
    assert {name: predicate[name] for name in tests} == tests


def test_scores_are_results_with_their_evaluation(run: Storage) -> None:
    """A task that the config asks for and that has none is a warning."""
    document = json.loads(run.read("config.json"))
    document["run"] = {"evaluation": {"tasks": ["hellaswag", "arc_easy"]}}
    run.write("config.json", json.dumps(document).encode())
    score = Score(task="hellaswag", metric="acc", value=0.25, error=0.01, samples=100, few_shot=0)
    settings = EvaluationConfig(tasks=("hellaswag",))
    for step, name in ((12, "0123456789"), (4, "of-a-checkpoint")):
        scored = Evaluation(step=step, settings=settings, scores=(score,), versions={"lm_eval": "0.4.13"})
        run.write(f"evaluations/{name}.json", scored.model_dump_json().encode())
    run.write("evaluations/lease/1.json", b"{}")
    predicate = statements.test_result_of(run)["predicate"]
    assert "hellaswag acc" in predicate["passedTests"]
    assert (predicate["result"], predicate["warnedTests"]) == ("WARNED", ["arc_easy"])
    found = named(predicate["configuration"])
    content = run.read("evaluations/0123456789.json")
    assert found["evaluations/0123456789.json"]["digest"] == {"sha256": sha256(content).hexdigest()}
    assert "evaluations/of-a-checkpoint.json" not in found


def test_figures_that_are_not_finite_are_text(run: Storage) -> None:
    """A node can write any figure, and JSON has no NaN."""
    with Path(run.address("metrics.jsonl")).open("a") as metrics:
        metrics.write('{"kind": "step", "step": 12, "step_seconds": "NaN"}\n')
    write_statements(run)
    statement = json.loads(run.read(f"final/{PROVENANCE}"))
    assert statement["predicate"]["buildDefinition"]["internalParameters"]["seconds"] == "NaN"


def test_ancestor_that_is_gone_leaves_its_weights(new_run: NewRun, finished_copy: Path) -> None:
    """Their checksums are in the run's own config."""
    origin = find_initial_weights(str(finished_copy), optimizer=False, root="none")
    folder = new_run("child", origin=origin)
    shutil.rmtree(finished_copy)
    found = {
        name.rpartition("/")[2]: resource
        for name, resource in named(dependencies_of(open_storage(str(folder)))).items()
    }
    assert origin is not None
    name, (_, checksum) = next(iter(origin.files.items()))
    assert found[name]["digest"] == {"crc32c": checksum}


def test_run_without_a_model_has_no_statement(finished_copy: Path) -> None:
    with pytest.raises(UserError, match="train-litgpt collect"):
        write_statements(open_storage(str(finished_copy)))
