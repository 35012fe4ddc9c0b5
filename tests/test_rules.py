"""What no test may do, for it is red some day without a fault: sleep, read a clock, bound a wait, choose a port."""

import ast
from collections.abc import Iterator
from pathlib import Path

from mutants import outdated

TESTS = Path(__file__).parent
# They wait and measure for the others, or are programs that tests start.
OWN = {"waiting.py", "leaks.py", "ci.py", "flaky.py", "mutants.py", "conftest.py"}
FILES = sorted(
    path for path in TESTS.rglob("*.py") if path.name not in OWN and path.relative_to(TESTS).parts[0] != "real"
)
CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "thread_time"}
MARKS = {"timeout", "flaky", "xfail", "skip"}


def broken_rules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and rule."""
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name in CLOCKS:
            yield node.lineno, "no clock: inject one, or measure in bench/"
        if name == "free_port":
            yield node.lineno, "no probe for a port: bind port 0 and hand it on"
        if name in MARKS and isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("mark"):
            yield node.lineno, f"no mark {name}: mend the test or delete it"
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in {"sleep", "time.sleep", "asyncio.sleep"}:
            yield node.lineno, "no sleep: wait for what is to happen (waiting.until)"
        for keyword in node.keywords:
            bound = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            waits = keyword.arg == "timeout" or (keyword.arg == "seconds" and called == "until")
            if waits and isinstance(bound, int | float):
                yield node.lineno, f"no {keyword.arg}=: the guard against hanging is pytest's"
        for argument in node.args:
            if called.endswith(("bind", "create_server", "Server")) and isinstance(argument, ast.Tuple):
                port = argument.elts[-1]
                if isinstance(port, ast.Constant) and port.value != 0:
                    yield node.lineno, "no port of its own: bind port 0 and hand it on"


def test_no_test_depends_on_how_busy_the_machine_is() -> None:
    found = [
        f"{path.relative_to(TESTS)}:{line} {rule}"
        for path in FILES
        for line, rule in broken_rules(ast.parse(path.read_text()))
    ]
    assert not found, "\n".join(found)


def test_each_mutant_is_up_to_date() -> None:
    assert [*outdated()] == []
