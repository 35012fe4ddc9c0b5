"""What is sent to a platform: golden files, and the fields in which other submissions differ from them."""

import os
from collections.abc import Iterator, Mapping, Sequence
from difflib import ndiff
from pathlib import Path
from typing import Any

import yaml

from launcher.job import Job, Submission

GOLDEN = Path(__file__).parent / "golden"
IMAGE = f"europe-west4-docker.pkg.dev/project/litgpt/train@sha256:{64 * '0'}"
PACKED = "eyJ"
"""How a specification begins that is packed into one word of a command line; it is told unpacked beside it."""


def training_job(root: str, **changes: Any) -> Job:
    """A training on two nodes whose files are under a root, or with these changes."""
    run = f"{root}/runs/owt-0123456789"
    fields: dict[str, Any] = {
        "name": "owt-0123456789", "attempt": 1, "nodes": 2, "processes": 8, "image": IMAGE,
        "program": ("-m", "litgpt_demo", "train", "--run", run), "directory": f"{run}/attempts/1",
        "stage": (f"{root}/datasets/owt-9876543210",), "labels": {"litgpt-demo.dev/flow-run-id": "none"},
    }  # fmt: skip
    return Job(**{**fields, **changes})


def require_golden(name: str, text: str) -> None:
    """Compare with a golden file; `make golden` writes it anew, and its difference is read in review."""
    file = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


def require_differences(name: str, found: Mapping[str, Any]) -> None:
    """Compare fields with those that a golden file tells."""
    require_golden(name, yaml.safe_dump(dict(found), sort_keys=False, default_flow_style=None, width=1000))


def differences(base: Submission, changed: Submission) -> dict[str, list[Any]]:
    """The fields in which two submissions differ, with both values; None is for a field that is not there."""
    first, second = (dict(_fields(submission.body)) for submission in (base, changed))
    paths = [*first, *(path for path in second if path not in first)]
    both = {path: (first.get(path), second.get(path)) for path in paths}
    return {path: _apart(*values) for path, values in both.items() if values[0] != values[1]}


def _fields(document: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its path; words of a command line and lines of a script are one value."""
    if isinstance(document, Mapping):
        for key, value in document.items():
            yield from _fields(value, f"{path}.{key}".lstrip("."))
    elif isinstance(document, Sequence) and not isinstance(document, str):
        if document and not any(isinstance(item, Mapping | list) for item in document):
            yield path, [_known(str(item)) for item in document]
        else:
            for number, item in enumerate(document):
                names = (item.get(key) for key in ("name", "displayName", "kind")) if isinstance(item, Mapping) else ()
                name = next((name for name in names if name), number)
                value = item["value"] if isinstance(item, Mapping) and item.keys() == {"name", "value"} else item
                yield from _fields(value, f"{path}.{name}")
    elif isinstance(document, str) and (" " in document or "\n" in document):
        yield path, [_known(word) for word in (document.splitlines() if "\n" in document else document.split(" "))]
    else:
        yield path, document


def _known(word: str) -> str:
    return "…" if word.startswith(PACKED) else word


def _apart(base: Any, changed: Any) -> list[Any]:
    """Both values; of long ones what only one of them has."""
    if not isinstance(base, list) or not isinstance(changed, list):
        return [" ".join(value) if isinstance(value, list) else value for value in (base, changed)]
    changes = list(ndiff(base, changed, linejunk=None, charjunk=None))
    gone, new = ([word[2:] for word in changes if word.startswith(mark)] for mark in ("- ", "+ "))
    return [" ".join(gone) or None, " ".join(new) or None]
