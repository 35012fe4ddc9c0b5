import pickle
import re
import signal
from pathlib import Path

import pytest

import launcher.errors
import litgpt_demo.errors
from cli.main import errors_for_people
from launcher.errors import JobFailed
from litgpt_demo.errors import EXIT_CODES, FailureClass, TrainLitgptError

DOCS = Path(__file__).parents[2] / "docs" / "failures.md"
KINDS = {
    kind
    for module in (litgpt_demo.errors, launcher.errors)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, TrainLitgptError)
}


@pytest.mark.parametrize("kind", sorted(KINDS, key=str))
def test_error_exits_with_the_code_of_its_class(
    kind: type[TrainLitgptError], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one that comes from another process."""
    error = kind("it broke", fix="mend it", fault=FailureClass.HANG if kind is JobFailed else None)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.fault) == (kind, "it broke; mend it", error.fault)
    with pytest.raises(SystemExit) as ended, errors_for_people():
        raise again
    assert ended.value.code == EXIT_CODES[error.fault] == error.exit_code
    assert "it broke; mend it" in capsys.readouterr().err


def test_failure_class_has_an_own_exit_code_in_the_docs() -> None:
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES)
    table = dict(re.findall(r"^\| ([^|]+) \| (\d+)\b", DOCS.read_text(encoding="utf-8"), re.MULTILINE))
    signals = {"closed terminal": signal.SIGHUP, "Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM}
    codes = {"done": 0, "wrong command line": 2} | {name: 128 + number for name, number in signals.items()}
    assert table == {name: str(code) for name, code in {**EXIT_CODES, **codes}.items()}, "on the page, and nothing else"
