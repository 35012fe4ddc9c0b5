import pickle

import pytest

import launcher.errors
import litgpt_demo.errors
from cli.main import errors_for_people
from launcher.errors import JobFailed
from litgpt_demo.errors import EXIT_CODES, FailureClass, TrainLitgptError

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
    message, page = capsys.readouterr().err.splitlines()
    assert "it broke; mend it" in message
    assert page == f"help: docs/reference/exit-codes.md#{error.exit_code}"


def test_failure_class_has_an_own_exit_code_and_a_meaning() -> None:
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES)
    assert all(fault.meaning for fault in FailureClass)
