"""Explanations of a cluster's refusals: who refused an object, in the cluster's own words, and what to do about it.

One table serves the dry runs before a submission, the submission itself, and the pods that are refused after it. A 403
alone says little: quotas, limits and policies answer with it as well as missing roles do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from launcher.platforms.kubernetes.access import CLUSTER_ROLES
from litgpt_demo.findings import Finding, Severity


@dataclass(frozen=True)
class Phrase:
    """A phrase of a cluster's message, and what it means. `{0}` stands for what the pattern's first group matched."""

    pattern: str
    code: str
    what: str
    fix: str
    severity: Severity = "warning"

    def read(self, text: str, area: str) -> Iterator[Finding]:
        """Yield a finding for every different place of the text that the phrase matches."""
        for match in dict.fromkeys(found.groups() for found in re.finditer(self.pattern, text)):
            words = [word.strip() for word in match]
            yield Finding(self.severity, f"{area}.{self.code}", self.what.format(*words), self.fix.format(*words))


# Wording of the API server's admission plug-ins (kubernetes: plugin/pkg/admission, staging/src/k8s.io/apiserver,
# staging/src/k8s.io/pod-security-admission; the same from 1.30 to 1.36).
REFUSALS = (
    Phrase(r"exceeded quota: ([^,]+), requested: (.*?), used: (.*?), limited: ([^,]+(?:,[^,=]+=[^,]+)*)", "quota",
           "the namespace's quota {0} has no room: {1} asked for, {2} in use, {3} allowed",
           "have the quota raised, wait for other jobs to end, or ask for less (platform.nodes, cpus, memory)"),
    Phrase(r"failed quota: ([^:]+): must specify ([^;,]+(?:[;,] ?[^;,]+)*)", "quota",
           "the namespace's quota {0} lets in only pods that specify {1}",
           "set platform.cpus and platform.memory for requests; limits come from a LimitRange with defaults", "error"),
    Phrase(r"((?:maximum|minimum) \S+ usage per \w+ is [^,\]]+?(?:, but (?:request|limit) is [^,\s\]]+"
           r"|\.\s+No (?:request|limit) is specified)|\S+ max limit to request ratio per \w+ is [^,\]]+"
           r"|must be less than or equal to \S+ limit(?: of [^\s,;\]]+)?)", "limits",
           "a LimitRange of the namespace does not allow it: {0}",
           "change platform.cpus or platform.memory, or have the LimitRange changed (`kubectl get limitranges`)",
           "error"),
    Phrase(r'violates PodSecurity "([^"]+)": (.+)', "pod-security",
           "the namespace enforces the Pod Security level {0}, which forbids the pods: {1}",
           "take another platform.namespace, or have its label pod-security.kubernetes.io/enforce lowered: baseline "
           "forbids platform.host_network and GPUDirect, restricted also platform.uid=0", "error"),
    Phrase(r'serviceaccount "([^"]+)" not found', "service-account", "the service account {0} is not there",
           "kubectl create serviceaccount {0}, or fix platform.service_account", "error"),
    Phrase(r"no PriorityClass with name (\S+) was found", "priority", "there is no PriorityClass {0}",
           "fix platform.priority", "error"),
    Phrase(r"(failed calling webhook .*)", "webhook", "{0}", "is that webhook's controller running?"),
    Phrase(r"""(?:admission webhook "|ValidatingAdmissionPolicy ')([^"']+)["'].*? denied (?:the )?request: (.*)""",
           "policy", "the cluster's policy {0} says no: {1}",
           "do what it says, or ask who runs the cluster for an exception", "error"),
    Phrase(r"(namespace \S+) because it is being terminated", "namespace", "the {0} is being removed",
           "take another platform.namespace, or wait and create it again", "error"),
    Phrase(r'([Uu]ser "[^"]+" cannot \w+ resource .*)', "permission", "{0}", CLUSTER_ROLES, "error"),
)  # fmt: skip


def refusals(message: str, area: str) -> list[Finding]:
    """Return all reasons that the message tells, each with its fix; never none.

    Args:
        area: what the findings' codes begin with.
    """
    known = [finding for phrase in REFUSALS for finding in phrase.read(message, area)]
    return known or [Finding("error", f"{area}.refused", message, "change what it names, or ask who runs the cluster")]


def advice(message: str) -> str:
    """Return what to do about a refusal, in one line."""
    return "; ".join(dict.fromkeys(finding.fix for finding in refusals(message, "gke")))
