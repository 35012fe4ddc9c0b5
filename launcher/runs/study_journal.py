"""Optuna's journal in a storage of ours: every operation is a file that is created once, in a folder or a bucket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from optuna.storages.journal import BaseJournalBackend

from litgpt_demo.documents import parse_json
from litgpt_demo.storage import Storage

_MOST = 1 << 20  # bytes of one operation; an outcome has 2 kB


class Journal(BaseJournalBackend):
    """The journal of one study. Of several writers at once each has its own number, so that none is lost."""

    def __init__(self, folder: Storage) -> None:
        self._folder = folder
        self._next = 0

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Yield the operations from this number on, in their order."""
        number = log_number_from
        while True:
            path = _path(number)
            try:
                content = self._folder.read(path, most=_MOST)
            except FileNotFoundError:
                break
            where, fix = self._folder.address(path), "move the study's folder away; its finished runs are found again"
            yield parse_json(content, dict[str, Any], where=where, fix=fix)
            number += 1
        self._next = max(self._next, number)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write operations behind those that are there."""
        for log in logs:
            while not self._folder.create(_path(self._next), json.dumps(log).encode()):
                self._next += 1
            self._next += 1


def _path(number: int) -> str:
    return f"{number:08}.json"
