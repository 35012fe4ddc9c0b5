"""A real server and worker, and a training that they brought to its end."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from served import Served, client, served

from launcher.config import RunConfig

__all__ = ["client", "served"]


@pytest.fixture(scope="package")
def tiny_run(served: Served, tiny_under: Callable[..., RunConfig]) -> RunConfig:
    """A training that Prefect's own command started and watched to its good end."""
    config = tiny_under(served.root, {"name": "whole"})
    parameters = [f"--param={name}={json.dumps(value)}" for name, value in config.model_dump(mode="json").items()]
    served.python("prefect", "deployment", "run", "train-litgpt/local", *parameters, "--watch")
    return config
