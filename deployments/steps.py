"""The build steps of prefect.yaml: Prefect calls them when it deploys; the file uses what they return by their `id`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from flows.parameters import examples_in, how_to_give, platform_in
from flows.submission import parameters_with
from launcher.config import config_document, overridden
from launcher.errors import ConfigProblem

CONFIGS = Path(__file__).resolve().parent / "configs"


def settings(
    flow: str, config: str, platform: str | None = None, yours: Mapping[str, Any] | str = ""
) -> dict[str, Any]:
    """Return the whole settings of a config as the parameters of a flow, and words on them as `about`.

    All of them: Prefect's form shows what a deployment stores, and a section that is given replaces the stored one.

    Args:
        platform: a profile, such as `profiles/gke.yaml`, as `--platform` takes one.
        yours: the user's own values by their dotted names, in place of those that the config has under these names.
            Prefect gives "" for a variable that nobody has set.
    """
    profile = None if platform is None else CONFIGS / platform
    document = config_document(CONFIGS / config, profile=profile)
    parameters = parameters_with(flow, overridden(document, _among(document, yours)), {})
    return {**parameters, "about": about(CONFIGS / config, parameters)}


def _among(document: Mapping[str, Any], yours: Mapping[str, Any] | str) -> dict[str, Any]:
    """Return those of the user's values whose names the config has: one set serves every config of a platform.

    Raises:
        ConfigProblem: they are no mapping.
    """
    if isinstance(yours, str) and yours:
        raise ConfigProblem(
            f"{yours!r} is a text, and a mapping of settings belongs into this variable of Prefect's; set it as JSON: "
            """prefect variable set NAME '{"root": "gs://your-bucket/prefix"}' --overwrite"""
        )
    return {name: value for name, value in dict(yours or {}).items() if _has(document, name)}


def _has(document: Any, name: str) -> bool:
    first, _, rest = name.partition(".")
    return isinstance(document, Mapping) and first in document and (not rest or _has(document[first], rest))


def about(config: Path, parameters: Mapping[str, Any]) -> str:
    """Return a description in Markdown: the comment that a config begins with, and what of it is left to its user."""
    lines = config.read_text(encoding="utf-8").splitlines()
    comment = "\n".join(line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines))
    source = f"Its settings are those of `deployments/configs/{config.name}`."
    if not (found := examples_in(parameters)):
        return f"{comment}\n\n{source}"
    named = ", ".join(f"`{name}`" for name in found)
    left = f"**Before its first run** give your own {named}: {how_to_give(found, platform_in(parameters))}."
    return f"{comment}\n\n{source}\n\n{left}"


async def queue(pool: str, name: str, limit: int) -> dict[str, Any]:
    """Make sure that a work pool has a queue of this name. A new one gets the limit; one that is there keeps its."""
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectAlreadyExists

    async with get_client() as client:
        with suppress(ObjectAlreadyExists):
            await client.create_work_queue(name, concurrency_limit=limit, work_pool_name=pool)
    return {"name": name}
