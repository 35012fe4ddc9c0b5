"""Print the sizes of the house and what makes it slow to read, each with its target: `make size`."""

from __future__ import annotations

import subprocess
import sys

from test_architecture import source
from test_language import (
    LAUNCHING_SIDE,
    LONGEST_TEST_NAME,
    SOURCE,
    expressions,
    files_with_prose,
    forbidden_variables,
    names_of_tests,
    phrases,
)
from test_size import ALLOWED, CHECKOUT, lines

TARGET_COMPLEXITY = 12  # cyclomatic, as ruff's C901 counts


def complex_functions() -> int:
    """Return the number of functions above the target complexity."""
    command = [sys.executable, "-m", "ruff", "check", "--select=C901", "--output-format=concise", "--exit-zero"]
    limit = f"--config=lint.mccabe.max-complexity={TARGET_COMPLEXITY}"
    found = subprocess.run([*command, limit, "."], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    return found.stdout.count(" C901 ")


def main() -> None:
    """Print a row for each figure."""
    names = names_of_tests()
    walruses, conditionals = map(sum, zip(*map(expressions, LAUNCHING_SIDE), strict=True))
    rows = [
        ("lines of source", lines("source"), 31_500),
        *((f"lines of {name}", lines(name), allowed) for name, allowed in ALLOWED.items() if name != "source"),
        ("source files", len(source()), 200),
        (
            "variables with forbidden names",
            sum(len(forbidden_variables(name)) for name in (*SOURCE, "bench", "tests")),
            0,
        ),
        ("walruses on the launching side", walruses, 60),
        ("conditional expressions on the launching side", conditionals, 350),
        (f"functions with a complexity above {TARGET_COMPLEXITY}", complex_functions(), 10),
        (
            "test names that begin with what or who",
            sum(name.startswith(("test_what_", "test_who_")) for name in names),
            0,
        ),
        (f"test names above {LONGEST_TEST_NAME} characters", sum(len(name) > LONGEST_TEST_NAME for name in names), 0),
        ("phrases that have a plainer form", sum(len(phrases(path)) for path in files_with_prose()), 0),
        ("lines of CHANGELOG.md", (CHECKOUT / "CHANGELOG.md").read_text("utf-8").count("\n"), 30),
    ]
    print("| what | now | target |\n|---|---|---|")
    for what, now, target in rows:
        print(f"| {what} | {now:,} | {target:,} |")


if __name__ == "__main__":
    main()
