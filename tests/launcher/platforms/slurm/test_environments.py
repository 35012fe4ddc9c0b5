"""The ways to the software of Slurm's nodes: what the script says, run by the bash and the modules that are here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from services.slurm_cluster import SlurmCluster
from waiting import until

import litgpt_demo
from launcher.errors import ConfigProblem, PlatformRefused
from launcher.job import Job, JobState
from launcher.platforms.slurm.environment_settings import (
    Environment,
    ModuleEnvironment,
    NodeEnvironment,
    VenvEnvironment,
)
from launcher.platforms.slurm.environments import Entered, check_environment, entered
from launcher.platforms.slurm.platform import SlurmPlatform
from launcher.platforms.slurm.shell import open_shell

DIGEST = f"sha256:{'ab' * 32}"
IMAGE = f"europe-docker.pkg.dev/project/litgpt/train@{DIGEST}"
_ANY: TypeAdapter[NodeEnvironment] = TypeAdapter(Environment)


def made(kind: str, **settings: Any) -> NodeEnvironment:
    return _ANY.validate_python({"kind": kind, **settings})


def ran(way: Entered, *command: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a script's lines and then a command, as a batch job's bash does."""
    script = "\n".join([*way.lines, 'exec "$@"'])
    clean = {"PATH": "/usr/bin:/bin", "HOME": "/nowhere", **(environ or {})}
    return subprocess.run(
        ["bash", "-c", script, "bash", *command], capture_output=True, text=True, env=clean, timeout=60
    )


def venv() -> VenvEnvironment:
    return VenvEnvironment(kind="venv", path=sys.prefix)


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param("venv", {"path": "venvs/litgpt"}, id="a relative path"),
        pytest.param("venv", {"path": "/shared/$USER/venv"}, id="a variable, which nobody expands"),
        pytest.param("conda", {"prefix": "litgpt"}, id="a conda name"),
        pytest.param("modules", {"modules": []}, id="no module"),
        pytest.param("modules", {"modules": ["cuda; rm -rf /"]}, id="a command"),
        pytest.param("pyxis", {"mounts": ["scratch:/data"]}, id="a relative mount"),
        pytest.param("pyxis", {"file": "litgpt.sqsh"}, id="a relative image"),
        pytest.param("apptainer", {"file": "/i/a.sif", "images": "/i"}, id="an image, and a folder for images"),
        pytest.param("apptainer", {"path": "/venv"}, id="a venv in a container"),
    ],
)
def test_what_cannot_be_on_nodes_is_refused(kind: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        made(kind, **settings)


def test_an_image_belongs_to_a_container() -> None:
    with pytest.raises(
        ConfigProblem, match=r"image=.* is given, and platform\.environment\.kind=venv runs no container"
    ):
        entered(venv(), image=IMAGE)


@pytest.mark.parametrize("kind", ["pyxis", "apptainer"])
def test_a_container_has_one_image(kind: str) -> None:
    with pytest.raises(ConfigProblem, match=r"is a container, and nothing names its image; give platform"):
        entered(made(kind), image=None)
    with pytest.raises(ConfigProblem, match=r"are both images; leave environment\.file out, or set image\.kind=none"):
        entered(made(kind, file="/images/litgpt"), image=IMAGE)


def test_apptainer_needs_a_place_for_the_image_as_a_file() -> None:
    with pytest.raises(ConfigProblem, match=r"has to become a file first; name a folder .*environment\.images"):
        entered(made("apptainer"), image=IMAGE)


# --- what the script says ---------------------------------------------------------------------------------------------


def test_a_venvs_python_runs_with_its_programs_on_the_path() -> None:
    way = entered(venv(), image=None)
    assert (way.srun, way.python) == ((), (f"{sys.prefix}/bin/python",))
    done = ran(way, *way.python, "-c", "import os, shutil, sys; print(sys.prefix, shutil.which('torchrun'))")
    assert done.stdout.split() == [sys.prefix, f"{sys.prefix}/bin/torchrun"]


def test_an_environment_that_is_not_there_ends_the_script_as_a_user_error() -> None:
    for environment in (made("venv", path="/no/such"), made("conda", prefix="/no/such")):
        done = ran(entered(environment, image=None), "true")
        assert done.returncode == 40
        assert "/no/such/bin/python is not there" in done.stderr
        assert "is its file system on the nodes?" in done.stderr


def test_a_conda_environment_is_activated_without_conda(tmp_path: Path) -> None:
    """A prefix as conda makes them: a python, and scripts of packages that set variables."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    (tmp_path / "etc/conda/activate.d").mkdir(parents=True)
    (tmp_path / "etc/conda/activate.d/cuda.sh").write_text('export CUDA_HOME="$CONDA_PREFIX/cuda"\n')
    way = entered(made("conda", prefix=str(tmp_path)), image=None)
    done = ran(way, "sh", "-c", 'printf "%s|%s|%s" "$CUDA_HOME" "$PYTHONNOUSERSITE" "${PATH%%:*}"')
    assert done.stdout == f"{tmp_path}/cuda|1|{tmp_path}/bin"
    assert ran(way, *way.python, "-c", "print('runs')").stdout == "runs\n"


def test_pyxis_gets_the_image_by_its_digest_and_the_folders() -> None:
    environment = made("pyxis", mounts=["/scratch:/data:ro", "/datasets"])
    way = entered(environment, image=IMAGE, folders=["/shared/runs"], variables={"NCCL_DEBUG": "INFO"})
    assert way == Entered(
        (),
        (
            f"--container-image=europe-docker.pkg.dev#project/litgpt/train:{DIGEST}",
            "--container-mounts=/shared/runs:/shared/runs,/scratch:/data:ro,/datasets:/datasets",
            "--no-container-mount-home",
        ),
        ("env", "NCCL_DEBUG=INFO", "python"),
    )


@pytest.mark.parametrize(
    ("image", "told"),
    [
        (f"library/gpt@{DIGEST}", f"library/gpt:{DIGEST}"),
        (f"localhost:5000/gpt@{DIGEST}", f"localhost:5000#gpt:{DIGEST}"),
    ],
)
def test_enroot_reads_registries_in_its_own_way(image: str, told: str) -> None:
    assert entered(made("pyxis"), image=image).srun[0] == f"--container-image={told}"


def test_a_container_by_a_file_needs_no_registry() -> None:
    assert entered(made("pyxis", file="/images/a.sqsh", home=True), image=None).srun == (
        "--container-image=/images/a.sqsh",
        "--container-mount-home",
    )


def test_apptainer_runs_a_file_with_the_gpus_and_folders() -> None:
    way = entered(made("apptainer", file="/images/a.sif", mounts=["/data"]), image=None, folders=["/shared"])
    assert way.python == (
        "apptainer", "exec", "--nv", "--bind", "/shared", "--bind", "/data", "/images/a.sif",
        "env", "PYTHONNOUSERSITE=1", "python",
    )  # fmt: skip
    assert "--nv" not in entered(made("apptainer", file="/images/a.sif"), image=None, gpus=False).python


def test_the_first_job_of_an_image_makes_apptainers_file_and_the_others_take_it(tmp_path: Path) -> None:
    """The program is a stand-in that refuses all but the words of its manual: there is no Apptainer here."""
    program = tmp_path / "bin/apptainer"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho pulled >> {tmp_path}/log\n'
        '[ $# = 3 ] && [ "$1" = pull ] && [ ! -e "$2" ] && [ "${3#docker://}" != "$3" ] || exit 9\n'
        'echo sif > "$2"\n'
    )  # fmt: skip
    program.chmod(0o755)
    way = entered(made("apptainer", images=str(tmp_path / "images")), image=IMAGE)
    for job in ("7", "8"):
        done = ran(way, "true", environ={"SLURM_JOB_ID": job, "PATH": f"{program.parent}:/usr/bin:/bin"})
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "log").read_text() == "pulled\n"
    assert [one.name for one in (tmp_path / "images").iterdir()] == [f"sha256-{'ab' * 32}.sif"]
    assert str(tmp_path / f"images/sha256-{'ab' * 32}.sif") in way.python


def test_a_node_without_apptainer_says_so(tmp_path: Path) -> None:
    done = ran(entered(made("apptainer", images=str(tmp_path)), image=IMAGE), "true")
    assert done.returncode == 40
    assert "there is no program apptainer -> name the module that brings it" in done.stderr


# --- modules ----------------------------------------------------------------------------------------------------------

_HAS_MODULES = subprocess.run(["bash", "-c", ". /etc/profile; type module"], capture_output=True).returncode == 0


@pytest.mark.services
@pytest.mark.skipif(not _HAS_MODULES, reason="there are no environment modules here: make test-services")
class TestModules:
    def environ(self, folder: Path) -> dict[str, str]:
        """Write a module that brings python."""
        (folder / "litgpt").mkdir()
        (folder / "litgpt/1.0").write_text(
            f"#%Module1.0\nprepend-path PATH {folder}/bin\nsetenv LITGPT_MODULE loaded\n"
        )
        (folder / "bin").mkdir()
        (folder / "bin/python").symlink_to(sys.executable)
        return {"MODULEPATH": str(folder)}

    def test_modules_are_loaded_in_a_shell_that_is_no_login(self, tmp_path: Path) -> None:
        way = entered(ModuleEnvironment(kind="modules", modules=("litgpt/1.0",)), image=None)
        done = ran(
            way, *way.python, "-c", "import os; print(os.environ['LITGPT_MODULE'])", environ=self.environ(tmp_path)
        )
        assert done.stdout == "loaded\n", done.stderr

    def test_a_module_that_is_not_there_ends_the_script_as_a_user_error(self, tmp_path: Path) -> None:
        environment = VenvEnvironment(kind="venv", path=sys.prefix, modules=("litgpt/2.0",))
        done = ran(entered(environment, image=None), "true", environ=self.environ(tmp_path))
        assert done.returncode == 40
        assert "module load litgpt/2.0 failed -> see module avail" in done.stderr

    def test_a_job_of_slurm_comes_to_its_python_by_a_module(
        self,
        slurm: SlurmCluster,
        platform_of: Callable[..., SlurmPlatform],
        job_of: Callable[..., Job],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Whose script is given nothing of the environment that it was submitted in."""
        modules = tmp_path / "modules"
        modules.mkdir()
        (modules / "gpt").write_text(
            f"#%Module1.0\nprepend-path PATH {tmp_path}/venv/bin\nsetenv LITGPT_MODULE loaded\n"
        )
        monkeypatch.setenv("MODULEPATH", str(modules))  # for the look at it before the job is submitted
        platform = platform_of(
            environment={"kind": "modules", "modules": ["gpt"]}, overrides={"MODULEPATH": str(modules)}
        )
        job_id = platform.submit(platform.render(job_of("echo module $LITGPT_MODULE")))
        until(lambda: platform.status(job_id).state.final, seconds=120)
        assert platform.status(job_id).state is JobState.SUCCEEDED
        told = [(line.node, line.text) for line in platform.logs(job_id).lines if line.text.startswith("module")]
        assert told == [(0, "module loaded"), (1, "module loaded")]


@pytest.mark.services
def test_a_job_whose_environment_is_not_there_is_refused_in_words(
    slurm: SlurmCluster, platform_of: Callable[..., SlurmPlatform], job_of: Callable[..., Job]
) -> None:
    platform = platform_of(environment={"kind": "conda", "prefix": "/no/such/prefix"})
    with pytest.raises(PlatformRefused, match="/no/such/prefix/bin/python is not there for conda environment"):
        platform.submit(platform.render(job_of("true")))


def test_a_node_without_modules_says_so() -> None:
    if _HAS_MODULES:
        pytest.skip("this machine has modules")
    done = ran(entered(made("modules", modules=["litgpt/1.0"]), image=None), "true")
    assert done.returncode == 40
    assert "this node has no environment modules" in done.stderr


# --- before it is submitted -------------------------------------------------------------------------------------------


def test_an_environment_that_has_everything_is_described() -> None:
    (finding,) = check_environment(open_shell(), venv())
    assert finding.severity == "info"
    assert "has torch " in finding.what


def test_an_environment_that_lacks_packages_is_an_error(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True, timeout=60)
    (finding,) = check_environment(open_shell(), made("venv", path=str(tmp_path)))
    assert finding.severity == "error"
    assert "lacks train-litgpt, torch, lightning, litgpt" in finding.what


def test_an_environment_of_another_version_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(litgpt_demo, "__version__", "99.0")
    (finding,) = check_environment(open_shell(), venv())
    assert finding.severity == "error"
    assert "and this one is 99.0: they have to be the same" in finding.what


def test_an_environment_that_is_not_there_is_an_error() -> None:
    (finding,) = check_environment(open_shell(), made("venv", path="/no/such"))
    assert finding.severity == "error"
    assert "/no/such/bin/python is not there" in finding.what


def test_a_slurm_without_pyxis_is_an_error() -> None:
    if "--container-image" in open_shell().run(["srun", "--help"]).out:
        pytest.skip("this srun has Pyxis")
    (finding,) = check_environment(open_shell(), made("pyxis", file="/images/a.sqsh"))
    assert finding.severity == "error"
    assert "knows no --container-image" in finding.what
