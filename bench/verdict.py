"""The verdict on recorded failures, scored beside two simple ways to blame somebody.

    make bench-verdict             it reads recorded cases, so that QUICK=1 changes nothing

tests/faults/cases.jsonl holds what failures left: most were caused on this product's own nodes, the others put together
from what platforms and libraries document. A class is right if it is the case's, a culprit if node and rank are one of
the case's. "held out" are those that were made after the verdict's rules had been fixed.

The first rank that torchrun names, and the last traceback in the logs, are what people look at. NVIDIA's resiliency
extension is not scored: its attribution of logs (0.6, with logsage 0.1) asks a language model at every step and does
not begin without a key to one, and the newest version that installs with glibc 2.36 or Python 3.11 (0.4.1) has none.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from bench.common import arguments, at_least, conclude
from litgpt_demo.errors import Fault, RankFailure, fault_of_exception
from tests.faults.case import Answer, Case, cases, judged

ASKED = 0.95  # DESIGN section 6

Judge: TypeAlias = Callable[[Case], Answer]


def ours(case: Case) -> Answer:
    verdict = judged(case)
    return Answer(fault=verdict.fault, node=verdict.node, rank=verdict.rank)


# What torchrun prints at its end (torch 2.13, ChildFailedError.format_msg).
_ROOT = re.compile(r"Root Cause \(first observed failure\)")
_FIELD = re.compile(r"(time|rank|exitcode)\s+: (\S+)")
# A rank's output: `[rank1]:[rank1]: KeyError: 'wte'`; torch's excepthook adds the second, torchrun the first.
_EXCEPTION = re.compile(r"^\[rank(\d+)\]:(?:\[rank\d+\]: ?)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?::.*)?)$")


def first_rank(case: Case) -> Answer:
    """The rank that torchrun calls the root cause, on the node that did so first; its class by its own words."""
    named = []
    for node in range(case.nodes):
        lines = [text for number, text in case.logs if number == node]
        start = next((place for place, text in enumerate(lines) if _ROOT.search(text)), None)
        if start is not None:
            fields = dict(found.groups() for text in lines[start : start + 8] if (found := _FIELD.search(text)))
            if fields.keys() >= {"time", "rank", "exitcode"}:
                named.append((fields["time"], node, int(fields["rank"]), int(fields["exitcode"])))
    if not named:
        return Answer(fault=Fault.UNKNOWN, node=None, rank=None)
    _, node, rank, code = min(named)
    words = [found[2] for _, text in case.logs if (found := _EXCEPTION.search(text)) and int(found[1]) == rank]
    failure = RankFailure(local_rank=0, exit_code=code, message=words[-1] if words else "", time=0.0)
    return Answer(fault=failure.fault, node=node, rank=rank)


def last_traceback(case: Case) -> Answer:
    """The rank whose traceback is the last in the logs as they came; its class as its last line says."""
    found = [(node, words) for node, text in case.logs if (words := _EXCEPTION.search(text))]
    if not found:
        return Answer(fault=Fault.UNKNOWN, node=None, rank=None)
    node, words = found[-1]
    return Answer(fault=fault_of_exception(words[2]), node=node, rank=int(words[1]))


def score(judge: Judge, those: Sequence[Case]) -> tuple[float, float, list[str]]:
    """Return the shares of right classes and right culprits, and a line for each case that is not right in both."""
    right: Counter[str] = Counter()
    wrong = []
    for case in those:
        answer = judge(case)
        same_class, same_culprit = answer.fault is case.fault, (answer.node, answer.rank) in case.culprits
        right.update({"class": same_class, "culprit": same_culprit})
        if not (same_class and same_culprit):
            right_one = " or ".join(f"node {node}, rank {rank}" for node, rank in case.culprits)
            said = f"{answer.fault} of node {answer.node}, rank {answer.rank}"
            wrong.append(f"{case.name}: {said}; it was {case.fault} of {right_one}")
    most = max(1, len(those))
    return right["class"] / most, right["culprit"] / most, wrong


def main() -> int:
    arguments(__doc__, rounds=1).parse_args()
    every = list(cases())
    parts = {"all": every, "held out": [case for case in every if case.held_out]}
    kinds = Counter((case.how, "held out" if case.held_out else "tuned on") for case in every)
    counted = ", ".join(f"{count} {how} and {part}" for (how, part), count in sorted(kinds.items()))
    print(f"{len(every)} failures: {counted}")
    seen: dict[str, Any] = {"cases": len(every), "counted": counted}
    bars = []
    seen["verdict"] = {}
    for part, those in parts.items():
        classes, culprits, wrong = score(ours, those)
        seen["verdict"][part] = {"class": classes, "culprit": culprits, "wrong": wrong}
        bars.append(at_least(f"verdict's class, {part}, {len(those)} failures", classes, ASKED))
        bars.append(at_least(f"verdict's culprit, {part}, {len(those)} failures", culprits, ASKED))
        if part == "all":
            print("\n".join(f"  wrong: {line}" for line in wrong) or "  none is wrong")
    for name, judge in (("the first rank that torchrun names", first_rank), ("the last traceback", last_traceback)):
        scores = {part: score(judge, those) for part, those in parts.items()}
        seen[name] = {part: {"class": one[0], "culprit": one[1], "wrong": one[2]} for part, one in scores.items()}
        print(f"{name}: class {scores['all'][0]:.3g}, culprit {scores['all'][1]:.3g}")
    print("NVIDIA's resiliency extension: not scored, its attribution needs a language model's key")
    return conclude("verdict", bars, seen)


if __name__ == "__main__":
    sys.exit(main())
