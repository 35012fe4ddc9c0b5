"""The diagnosis of recorded failures, scored beside two simple ways to blame somebody.

tests/faults/cases.jsonl holds what failures left: most were caused on this product's own nodes, the others put together
from what platforms and libraries document. A class is right if it is the case's, a culprit if node and rank are one of
the case's. "held out" are those that were made after the diagnosis's rules had been fixed.

The first rank that torchrun names, and the last traceback in the logs, are what people look at. NVIDIA's resiliency
extension is not scored: its attribution of logs (0.6, with logsage 0.1) does not begin without a language model's key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from litgpt_demo.errors import FailureClass, RankFailure, fault_of_exception
from tests.faults.case import Answer, Case, cases, judged

ASKED = 0.95  # DESIGN section 6
NOBODY = Answer(fault=FailureClass.UNKNOWN, node=None, rank=None)

# What torchrun prints at its end (torch 2.13, ChildFailedError.format_msg).
_ROOT = "Root Cause (first observed failure)"
_FIELD = re.compile(r"(time|rank|exitcode)\s+: (\S+)")
# A rank's output: `[rank1]:[rank1]: KeyError: 'wte'`; torch's excepthook adds the second, torchrun the first.
_EXCEPTION = re.compile(r"^\[rank(\d+)\]:(?:\[rank\d+\]: ?)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?::.*)?)$")


def first_rank(case: Case) -> Answer:
    """The rank that torchrun calls the root cause, on the node that did so first; its class by its own words."""
    named = []
    for node in range(case.nodes):
        lines = [text for number, text in case.logs if number == node]
        start = next((place for place, text in enumerate(lines) if _ROOT in text), len(lines))
        fields = dict(found.groups() for text in lines[start : start + 8] if (found := _FIELD.search(text)))
        if fields.keys() >= {"time", "rank", "exitcode"}:
            named.append((fields["time"], node, int(fields["rank"]), int(fields["exitcode"])))
    if not named:
        return NOBODY
    _, node, rank, code = min(named)
    messages = [found[2] for _, text in case.logs if (found := _EXCEPTION.search(text)) and int(found[1]) == rank]
    failure = RankFailure(local_rank=0, exit_code=code, message=messages[-1] if messages else "", time=0.0)
    return Answer(fault=failure.fault, node=node, rank=rank)


def last_traceback(case: Case) -> Answer:
    """The rank whose traceback is the last in the logs as they came; its class as its last line says."""
    found = [(node, match) for node, text in case.logs if (match := _EXCEPTION.search(text))]
    if not found:
        return NOBODY
    node, match = found[-1]
    return Answer(fault=fault_of_exception(match[2]), node=node, rank=int(match[1]))


JUDGES = {"diagnosis": judged, "the first rank that torchrun names": first_rank, "the last traceback": last_traceback}


def score(judge: Callable[[Case], Answer], scored: Sequence[Case]) -> tuple[float, float, list[str]]:
    """Return the shares of right classes and right culprits, and a line for each case that is not right in both."""
    classes, culprits, wrong = 0, 0, []
    for case in scored:
        answer = judge(case)
        same_class, same_culprit = answer.fault is case.fault, (answer.node, answer.rank) in case.culprits
        classes, culprits = classes + same_class, culprits + same_culprit
        if not same_class or not same_culprit:
            right_one = " or ".join(f"node {node}, rank {rank}" for node, rank in case.culprits)
            diagnosis = f"{answer.fault} of node {answer.node}, rank {answer.rank}"
            wrong.append(f"{case.name}: {diagnosis}; it was {case.fault} of {right_one}")
    return classes / len(scored), culprits / len(scored), wrong


def measure(_: int) -> tuple[dict[str, Any], dict[str, Any]]:
    every, bars = list(cases()), {}
    seen: dict[str, Any] = {name: {} for name in JUDGES}
    for part, scored in {"all": every, "held out": [case for case in every if case.held_out]}.items():
        for name, judge in JUDGES.items():
            classes, culprits, wrong = score(judge, scored)
            seen[name][part] = {"class": classes, "culprit": culprits, "wrong": wrong}
            print(f"{name}, {part}: class {classes:.3g}, culprit {culprits:.3g}")
        for what in ("class", "culprit"):
            bars[f"diagnosis's {what}, {part}, {len(scored)} failures"] = (
                seen["diagnosis"][part][what],
                "at least",
                ASKED,
            )
    print("\n".join(f"  wrong: {line}" for line in seen["diagnosis"]["all"]["wrong"]) or "  none is wrong")
    return bars, seen
