from __future__ import annotations

import pytest

from launcher.errors import ConfigProblem, NoCredentials, PlatformUnreachable
from launcher.findings import fault_of_refusal, finding_of, require
from litgpt_demo.errors import DataError, Fault
from litgpt_demo.findings import Finding

NO_ROOT = Finding("error", "root.missing", "output is not there", "create it")
NO_CORPUS = Finding("error", "corpus.empty", "the corpus is empty")
SILENT = finding_of(PlatformUnreachable("the cluster does not answer; try again"), "gke.cluster")
NO_LOGIN = finding_of(NoCredentials("there are none; log in"), "gke.login")
NO_TEXT = finding_of(DataError("the corpus holds no text"), "data.refused")
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


@pytest.mark.parametrize(
    ("findings", "fault"),
    [
        ([SLOW], None),
        ([SILENT], Fault.UNREACHABLE),
        ([SILENT, SLOW, SILENT], Fault.UNREACHABLE),
        ([SILENT, NO_LOGIN], Fault.USER),
        ([SILENT, NO_ROOT], Fault.USER),
        ([SILENT, NO_TEXT], Fault.DATA),
        ([NO_LOGIN], Fault.USER),
    ],
)
def test_a_run_is_refused_to_be_tried_again_only_where_silence_is_all_that_is_in_its_way(
    findings: list[Finding], fault: Fault | None
) -> None:
    assert fault_of_refusal(findings) is fault
    if fault is not None and fault is not Fault.DATA:
        with pytest.raises(ConfigProblem) as refused:
            require(findings)
        assert refused.value.fault is fault
