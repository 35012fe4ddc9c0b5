"""The choice of a builder for `image: {kind: auto}`, by what is at hand."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import ImageProblem
from launcher.images.build import Site
from launcher.images.docker import answering_engine
from launcher.images.settings import AutoImage, BuiltImage, CloudBuildImage, ClusterImage, DockerImage, artifact_project
from litgpt_demo.storage import bucket_path


@dataclass(frozen=True, kw_only=True)
class AtHand:
    """The things that could build, or that a builder elsewhere needs."""

    engine: str | None
    """The container engine that answers on this machine."""
    cluster: bool
    """The platform is a cluster where a Job can be created."""
    bucket: bool
    """The root is a bucket, through which a context can be sent."""
    google: bool
    """This machine has credentials of Google Cloud."""


def chosen_builder(image: AutoImage, site: Site, *, patience: float = 10.0) -> tuple[BuiltImage, str]:
    """Return the image with its builder, and the reason in words; each engine has so many seconds to answer.

    Raises:
        ImageProblem: nothing here can build it.
    """
    engine = answering_engine(limit=patience)
    hand = AtHand(
        engine=engine,
        cluster=site.in_cluster is not None,
        bucket=bucket_path(site.root) is not None,
        google=engine is None and _has_google_credentials(),
    )
    return choose(image, hand)


def planned(image: BuiltImage, site: Site) -> str:
    """Return in words what would build the image, and for `auto` the reason."""
    why = ""
    if isinstance(image, AutoImage):
        try:
            image, why = chosen_builder(image, site, patience=1.0)  # there are three engines, and a plan takes seconds
        except ImageProblem:
            return "by what is at hand: nothing is"
    by = "a Job in the cluster"
    match image:
        case DockerImage():
            by = "the engine on this machine" if image.engine == "auto" else image.engine
        case CloudBuildImage():
            by = f"Cloud Build in {image.billed}"
    return f"by {by}" + (f" ({why})" if why else "")


def choose(image: AutoImage, hand: AtHand) -> tuple[BuiltImage, str]:
    """Choose by what is at hand; the first that can work wins, and what is nearest comes first.

    Raises:
        ImageProblem: nothing can; the message says what each lacks.
    """
    settings = {name: value for name, value in image.model_dump().items() if name != "kind"}
    if hand.engine is not None:
        why = f"{hand.engine} answers on this machine"
        return DockerImage(kind="docker", engine=hand.engine, **settings), why
    no_engine = "no container engine answers here"
    project = artifact_project(image.repository)
    elsewhere = image.pip_config is None  # it may hold a password, and would be stored in the bucket
    if elsewhere and project and hand.bucket and hand.google:
        why = f"{no_engine}, the repository is in Artifact Registry and there are credentials for {project}"
        return CloudBuildImage(kind="cloudbuild", **settings), why
    if elsewhere and hand.cluster and hand.bucket:
        return ClusterImage(kind="cluster", **settings), f"{no_engine}, and the platform's cluster can build"
    lacks = [
        f"docker: {no_engine} (install Docker, Podman or Buildah, or start it)",
        "cloudbuild: " + _lacking({
            "no image.pip_config": elsewhere, "a repository in Artifact Registry": project,
            "a root in a bucket": hand.bucket, "credentials": hand.google,
        }),
        "cluster: " + _lacking({
            "no image.pip_config": elsewhere, "a platform of kind gke": hand.cluster, "a root in a bucket": hand.bucket,
        }),
    ]  # fmt: skip
    raise ImageProblem(
        "image.kind=auto finds nothing that could build:\n  "
        + "\n  ".join(lacks)
        + "\n-> make one of them possible, or "
        "build the image elsewhere and set image to {kind: prebuilt, reference: …}"
    )


def _lacking(needs: dict[str, object]) -> str:
    return "needs " + " and ".join(what for what, there in needs.items() if not there)


def _has_google_credentials() -> bool:
    """Return whether Google's libraries would find any, without asking anybody: a metadata server takes its time."""
    home = Path(os.environ.get("CLOUDSDK_CONFIG") or Path.home() / ".config" / "gcloud")
    given = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    return Path(given or home / "application_default_credentials.json").is_file() or _on_google_cloud()


def _on_google_cloud() -> bool:
    """https://cloud.google.com/compute/docs/instances/detect-compute-engine"""
    name = Path("/sys/class/dmi/id/product_name")
    return name.is_file() and name.read_text(errors="replace").strip() in {"Google", "Google Compute Engine"}
