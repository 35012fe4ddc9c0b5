"""Every command in README.md and docs/ is run here, or its config is, where another test runs the same thing."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from console_script import Cli

PAGES = [Path("README.md"), Path("SECURITY.md"), *sorted(Path("docs").glob("*.md"))]
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
DRILL = re.compile(r"drill `([\w-]+)`")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)#]+)\)")


def commands() -> Iterator[tuple[str, list[str]]]:
    """Page and words of each command line; comments are left out."""
    for page in PAGES:
        for block in BLOCK.findall(page.read_text(encoding="utf-8")):
            for line in block.splitlines():
                if words := shlex.split(line, comments=True):
                    yield str(page), words


COMMANDS = list(commands())


@pytest.fixture
def cluster_with_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What leads a command on configs/gke*.yaml to a cluster that has what the config needs, without the downloads."""
    from bucket_emulator import bucket_emulator
    from kubernetes_cluster import running_cluster

    with running_cluster(simulate=True, nodes=0) as cluster, bucket_emulator("my-bucket") as bucket:
        labels = {"cloud.google.com/gke-accelerator": "nvidia-l4"}
        cluster.add_nodes(2, gpus=4, machine="g2-standard-48", labels=labels)
        cluster.apply("serviceaccounts", {"metadata": {"name": "trainer"}})
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", bucket)
        corpus = "corpus: {kind: stdlib, max_bytes: 2_000_000}, tokenizer: {kind: train, vocab_size: 500}"
        elsewhere = ["platform.cluster=null", "platform.location=null", f"platform.kubeconfig={cluster.kubeconfig}"]
        yield [*elsewhere, f"data={{{corpus}, validation_fraction: 0.1}}"]


def of(program: str) -> list[object]:
    """The distinct commands of one program, named after themselves."""
    found = {" ".join(words): words for _, words in COMMANDS if words[0] == program}
    return [pytest.param(words, id=line) for line, words in found.items()]


@pytest.mark.parametrize("words", of("make"))
def test_each_make_command_has_its_target(words: list[str]) -> None:
    done = subprocess.run([*words, "--dry-run"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", of("train-litgpt"))
def test_each_command_of_ours_does_what_the_page_says(
    words: list[str], tmp_path: Path, cli: Cli, request: pytest.FixtureRequest
) -> None:
    verb, *arguments = words[1:]
    if any("configs/gke" in argument for argument in arguments):
        done = cli("plan" if verb == "run" else verb, *arguments, *request.getfixturevalue("cluster_with_gpus"))
        if verb in {"status", "logs", "cancel"}:  # nothing has been started there, and it says so
            assert "nothing has been started under" in done.err, done
        else:
            assert done.code == 0, done
        return
    if verb in {"run", "prepare", "sweep", "benchmark-network"}:
        # test_end_to_end.py and tests/flows/ run them; here their configs must stand, with nothing in the way.
        done = cli("plan", *arguments, f"root={tmp_path}")
    elif verb == "submit":
        from flows.submission import parameters_with
        from launcher.config import RunConfig, load, overrides_of

        deployed = load(RunConfig, Path("deployments/configs/local.yaml")).model_dump(mode="json")
        assert parameters_with("train-litgpt", deployed, overrides_of(arguments[1:])) != deployed
        return
    elif verb == "drill":  # tests/cli/test_drills.py and tests/drills hold some; all of them take half an hour
        from cli.drills.command import chosen, config_for

        assert chosen(config_for(None, arguments), [])
        return
    elif verb == "doctor":
        done = cli("doctor", f"--root={tmp_path}")
    elif verb == "settings":
        done = cli(verb, *arguments)
    elif verb == "verify":  # the page's dataset is an example, and it says so
        assert "no manifest" in cli(verb, str(tmp_path / arguments[0])).err
        return
    elif verb == "runs":
        done = cli(verb, str(tmp_path))
    elif verb in {"status", "logs", "cancel", "collect"}:  # nothing has been started under this root, and it says so
        where = [f"root={tmp_path}"] if arguments[0].endswith(".yaml") else [f"--root={tmp_path}"]
        if "/" in arguments[0] and not arguments[0].endswith(".yaml"):
            arguments[0] = str(tmp_path / arguments[0])
        refused = cli(verb, *arguments, *where)
        assert re.search(r"nothing has been started under|config\.json is not there", refused.err), refused.err
        return
    else:
        done = cli(verb, *arguments, f"root={tmp_path}")
    assert done.code == 0, done


def test_no_command_is_of_a_kind_that_is_not_tested() -> None:
    assert {words[0] for _, words in COMMANDS} <= {"make", "train-litgpt", "prefect", "."}


def test_the_deployment_that_prefect_is_asked_for_exists() -> None:
    import yaml

    listed = yaml.safe_load(Path("deployments/prefect.yaml").read_text())["deployments"]
    flows = {
        entry["entrypoint"].split(".")[-1].split(":")[-1].replace("_", "-") + "/" + entry["name"] for entry in listed
    }
    asked = {words[3] for _, words in COMMANDS if words[:3] == ["prefect", "deployment", "run"]}
    assert asked
    assert asked <= flows


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_each_link_to_a_file_leads_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page} points to {target}"


@pytest.mark.parametrize("promises", ["docs/security.md", "docs/survival.md"])
def test_each_promise_names_tests_and_drills_that_exist(promises: str) -> None:
    from cli.drills.table import DRILLS

    page, held = Path(promises).read_text(encoding="utf-8"), {drill.name for drill in DRILLS}
    table = page.partition("| promise | shown by |\n")[2].partition("\n\n")[0]
    rows = table.splitlines()[1:]
    assert rows
    for row in rows:
        promise, shown = (cell.strip() for cell in row.strip("|").split("|"))
        tests = TEST.findall(shown)
        drills = DRILL.findall(shown)
        assert DRILL.sub("", TEST.sub("", shown)).strip() == "", f"{promise}: {shown}"
        assert tests or drills, f"{promise}: nothing shows it"
        assert set(drills) <= held, promise
        missing = [f"{file}::{name}" for file, name in tests if name not in functions_in(Path(file))]
        assert missing == [], promise


def functions_in(file: Path) -> set[str]:
    """The tests of a module; none where there is no such file."""
    source = file.read_text(encoding="utf-8") if file.is_file() else ""
    return {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
