"""The settings of the nodes' software on Slurm: a venv, conda, modules, or a container by Pyxis or Apptainer.

A cluster's own ways to software are its users' habits, so that each is a branch of one setting.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from litgpt_demo.settings import Kind, Settings

_PATH = r"^/[^\s:,'\"\\$`]*$"
NodePath = Annotated[str, StringConstraints(pattern=_PATH)]
"""An absolute path on the nodes: a job starts in another folder than the one it is written in."""
Module = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+/-]*$")]
Mount = Annotated[str, StringConstraints(pattern=r"^/[^\s:,'\"\\$`]*(:/[^\s:,'\"\\$`]*(:[a-z]+)?)?$")]


class NodeEnvironment(Settings):
    """The settings of every way to the nodes' environment."""

    kind: str
    modules: tuple[Module, ...] = ()
    """Environment modules that are loaded first, in this order, with their versions: cuda/12.8."""


class VenvEnvironment(NodeEnvironment):
    """A virtual environment that all nodes see, with this package and torch in it."""

    model_config = ConfigDict(title="Virtual environment")

    kind: Literal["venv"] = Kind("venv")
    path: NodePath
    """Its folder, which has bin/python; on a file system that all nodes see."""


class CondaEnvironment(NodeEnvironment):
    """A conda environment that all nodes see, with this package and torch in it."""

    model_config = ConfigDict(title="Conda environment")

    kind: Literal["conda"] = Kind("conda")
    prefix: NodePath
    """Its folder, which has bin/python and conda-meta; `conda env list` shows it."""


class ModuleEnvironment(NodeEnvironment):
    """The Python of the cluster's own modules, with this package and torch in it."""

    model_config = ConfigDict(title="Modules")

    kind: Literal["modules"] = Kind("modules")
    modules: tuple[Module, ...] = Field(min_length=1)
    """Environment modules that are loaded, in this order, with their versions; one of them brings Python and torch."""


class ContainerEnvironment(NodeEnvironment):
    """The settings of every container."""

    file: NodePath | None = None
    """An image file that all nodes see; empty takes the image of the `image` section, by its digest."""
    mounts: tuple[Mount, ...] = ()
    """Further folders of the nodes: /scratch, or /scratch:/data, or /scratch:/data:ro. A root that is a folder is
    mounted anyway."""


class PyxisEnvironment(ContainerEnvironment):
    """A container by the Pyxis plug-in of `srun`, which has Enroot start it."""

    model_config = ConfigDict(title="Container by Pyxis")

    kind: Literal["pyxis"] = Kind("pyxis")
    home: bool = False
    """Mount the user's home folder as well."""


class ApptainerEnvironment(ContainerEnvironment):
    """A container by Apptainer, or by SingularityCE, which takes the same words."""

    model_config = ConfigDict(title="Container by Apptainer")

    kind: Literal["apptainer"] = Kind("apptainer")
    program: Literal["apptainer", "singularity"] = "apptainer"
    """The program; `modules` may bring it."""
    images: NodePath | None = None
    """A folder that all nodes see, where the image of the `image` section is kept as a file: the first job of an image
    makes it there."""

    @model_validator(mode="after")
    def _has_one_image(self) -> Self:
        if self.file is not None and self.images is not None:
            raise ValueError(
                f"environment.file={self.file!r} is an image, and environment.images={self.images!r} the folder "
                "for images that are made into files; leave one out"
            )
        return self


Environment = Annotated[
    VenvEnvironment | CondaEnvironment | ModuleEnvironment | PyxisEnvironment | ApptainerEnvironment,
    Field(discriminator="kind"),
]
