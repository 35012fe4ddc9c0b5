"""Mistakes of one line that some test has to notice: `make mutants`, or `make mutants ONLY="NAME …"` for some of them.

Each is made in a copy of the checkout, and the tests that should notice it run there until one fails. In the end the
tests that failed run once more on the source as it is: one that fails there too has noticed nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A mistake in one line of the source."""

    name: str
    path: str
    old: str
    """A piece of one line, which the file has once."""
    new: str
    why: str
    """What the mistake would do."""
    tests: tuple[str, ...]
    """Files, or single tests of slow files (`file::test`), one of which notices it."""

    def mutated(self, source: str) -> str:
        """Return the file's text with the mistake in it.

        Raises:
            ValueError: the file does not have the piece, or has it several times.
        """
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"{self.path} has {self.old!r} {count} times, not once; write the mutant anew")
        return source.replace(self.old, self.new)


MUTANTS = (
    # --- launcher -----------------------------------------------------------------------------------------------------
    Mutant(
        name="first-attempt-instead-of-last",
        path="launcher/attempts.py",
        old="return last if last is not None and last.status.state.live else None",
        new="return next((one for one in self.all()[:1] if one.status.state.live), None)",
        why="A run whose first attempt failed looks idle while its second trains: a second job is started beside it.",
        tests=("tests/launcher/test_attempts.py",),
    ),
    Mutant(
        name="registry-swaps-the-image",
        path="launcher/registry.py",
        old="if reference.digest not in {None, digest}:",
        new="if reference.digest == digest == None:",
        why="Nodes run an image that nobody pinned.",
        tests=("tests/launcher/test_images.py",),
    ),
    Mutant(
        name="password-to-an-http-realm",
        path="launcher/registry.py",
        old='if login and realm.scheme != "https" and not is_local(realm.host):',
        new='if login and realm.scheme != "https" and not is_local(reference.host):',
        why="A registry's password crosses the network in clear text.",
        tests=("tests/launcher/test_images.py",),
    ),
    Mutant(
        name="runai-name-not-compared",
        path="launcher/runai/rest.py",
        old='if one.get("name") == name and str(',
        new="if str(",
        why="Attempt 1 adopts or deletes attempt 11, because Run:ai's filter matches the beginning of a name.",
        tests=("tests/launcher/runai/test_runai_rest.py",),
    ),
    Mutant(
        name="runai-project-not-compared",
        path="launcher/runai/rest.py",
        old='one.get("name") == name and str(one.get("projectId")) == project]',
        new='one.get("name") == name]',
        why="A job of the same name in somebody else's project is adopted or deleted.",
        tests=("tests/launcher/runai/test_runai_rest.py",),
    ),
    Mutant(
        name="runai-follows-redirects",
        path="launcher/runai/rest.py",
        old="follow_redirects=False",
        new="follow_redirects=True",
        why="The application's secret is posted to wherever the control plane's address leads by now.",
        tests=("tests/launcher/runai/test_runai_rest.py",),
    ),
    Mutant(
        name="service-account-token-mounted",
        path="launcher/kubernetes/pods.py",
        old='"automountServiceAccountToken": False',
        new='"automountServiceAccountToken": True',
        why="Any script that runs in a pod may use the cluster's API.",
        tests=("tests/launcher/kubernetes/test_rendering.py::test_no_pod_gets_a_token_of_the_clusters_api",),
    ),
    Mutant(
        name="capabilities-kept",
        path="launcher/kubernetes/pods.py",
        old='"capabilities": {"drop": ["ALL"]},',
        new="",
        why="Pods keep privileges that nothing in them needs.",
        tests=(
            "tests/launcher/kubernetes/test_rendering.py::test_a_node_keeps_no_capability_that_its_network_does_not_need",
        ),
    ),
    # --- litgpt_demo --------------------------------------------------------------------------------------------------
    Mutant(
        name="rank-before-the-nodes-number",
        path="litgpt_demo/peers.py",
        old='NODE_RANKS = ("PET_NODE_RANK", "JOB_COMPLETION_INDEX", "RANK")',
        new='NODE_RANKS = ("RANK", "PET_NODE_RANK", "JOB_COMPLETION_INDEX")',
        why="A process's rank is taken for its node's number, so that nodes wait for peers that never come.",
        tests=("tests/litgpt_demo/test_peers.py",),
    ),
)


# --- the run ----------------------------------------------------------------------------------------------------------

# Seconds that one test may take; a mistake that makes one hang is noticed too.
_TIMEOUT = 240
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "output", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")


class Copy:
    """A copy of the checkout, in which files may be changed and tests run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "checkout"
        shutil.copytree(CHECKOUT, self._folder, ignore=_LEFT_OUT)

    @contextmanager
    def with_mistake(self, mutant: Mutant) -> Iterator[None]:
        path = self._folder / mutant.path
        source = path.read_text(encoding="utf-8")
        self._write(path, mutant.mutated(source))
        try:
            yield
        finally:
            self._write(path, source)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        # Python compares sizes and whole seconds only.
        Path(cache_from_source(str(path))).unlink(missing_ok=True)

    def failing(self, tests: Sequence[str], *options: str) -> list[str]:
        """Return the tests that fail, without their parameters.

        Raises:
            RuntimeError: pytest could not run them.
        """
        always = ["-n", "0", "--tb=no", "-rfE", "-p", "no:cacheprovider", f"--timeout={_TIMEOUT}"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *always, *options, *tests],
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": str(self._folder)},  # processes that tests start import the copy too
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        found = re.findall(r"^(?:FAILED|ERROR) ([^\s\[]+)", done.stdout, re.MULTILINE)
        if done.returncode != 0 and not found:
            words = (done.stdout + done.stderr)[-2000:]
            raise RuntimeError(f"pytest {' '.join(tests)} ended with {done.returncode}: {words}")
        return found


def main(names: Sequence[str]) -> int:
    """Make the mistakes of these names, or all of them, one after the other; returns the exit code."""
    if unknown := set(names) - {mutant.name for mutant in MUTANTS}:
        print(f"there is no mutant {', '.join(sorted(unknown))}; {Path(__file__).name} has their names")
        return 2
    wanted = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    killers: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(Path(folder))
        for number, mutant in enumerate(wanted, 1):
            start = time.monotonic()
            with copy.with_mistake(mutant):
                failed = copy.failing(mutant.tests, "-x")
            killers |= {mutant.name: failed[0]} if failed else {}
            words = f"killed by {failed[0]}" if failed else f"SURVIVED: {mutant.why}"
            print(f"{number}/{len(wanted)} {mutant.name}: {words} ({time.monotonic() - start:.0f} s)", flush=True)
        # A test that fails without the mistake too has noticed nothing.
        broken = copy.failing(sorted(set(killers.values()))) if killers else []
    for test in broken:
        print(f"{test} fails without a mistake too")
    killed = [name for name, test in killers.items() if test not in broken]
    print(f"{len(killed)} of {len(wanted)} mutants were killed")
    return 0 if len(killed) == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
