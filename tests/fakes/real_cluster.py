"""The real cluster of `make test-cluster`: what has to be set so that there is one."""

import os

import pytest


def needed(*names: str) -> list[str]:
    """Return the variables' values.

    Raises:
        pytest.fail.Exception: One is not set. Nothing is skipped: who asks for these tests wants them run.
    """
    if missing := [name for name in names if not os.environ.get(name)]:
        pytest.fail(
            f"{', '.join(missing)}: not set. The tests of `make test-cluster` run on a real cluster, and need it to be "
            'named; CONTRIBUTING.md, "On your own cluster", says how.',
            pytrace=False,
        )
    return [os.environ[name] for name in names]
