"""python shrink.py < the CRD that JobSet publishes > jobset.x-k8s.io_jobsets.yaml"""

import sys
from typing import Any

import yaml


def small(thing: Any) -> Any:
    """Without descriptions, and with any fields in the pod template, which Kubernetes' own schemas know."""
    if isinstance(thing, list):
        return [small(item) for item in thing]
    if not isinstance(thing, dict):
        return thing
    if "podFailurePolicy" in thing and "template" in thing:
        thing = {**thing, "template": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    return {key: small(value) for key, value in thing.items() if key != "description" or not isinstance(value, str)}


print(yaml.safe_dump(small(yaml.safe_load(sys.stdin)), sort_keys=False), end="")
