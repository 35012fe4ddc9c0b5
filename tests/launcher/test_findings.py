from __future__ import annotations

import pytest

from launcher.errors import ConfigProblem
from launcher.findings import require
from litgpt_demo.findings import Finding

NO_ROOT = Finding("error", "root.missing", "output is not there", "create it")
NO_CORPUS = Finding("error", "corpus.empty", "the corpus is empty")
SLOW = Finding("warning", "disk.slow", "the disk is slow", "use another")


def test_findings_without_an_error_are_handed_on() -> None:
    assert require(iter([SLOW])) == [SLOW]


def test_one_error_is_the_message_and_does_not_call_itself_an_error_once_more() -> None:
    with pytest.raises(ConfigProblem) as refused:
        require([SLOW, NO_ROOT])
    assert str(refused.value) == "[root.missing] output is not there -> create it"


def test_several_errors_are_counted_and_listed() -> None:
    with pytest.raises(ConfigProblem) as refused:
        require([NO_ROOT, SLOW, NO_CORPUS])
    assert str(refused.value).splitlines() == [
        "2 problems:",
        "  [root.missing] output is not there -> create it",
        "  [corpus.empty] the corpus is empty",
    ]
