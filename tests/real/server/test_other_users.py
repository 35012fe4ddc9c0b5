"""Locks of one user do not block another user of this machine. The test needs root."""

from __future__ import annotations

import fcntl

import pytest
from another_user import as_nobody, needs_another_user, shared_temporary

from flows.parameters import acquire_process_lock


@needs_another_user
def test_another_user_cannot_choose_the_file_of_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    with shared_temporary(monkeypatch) as shared:
        (victim := shared / "victim").touch(mode=0o600)
        assert as_nobody('ln -s "$1" "$2"', victim, shared / "train-litgpt-lock")
        assert acquire_process_lock("5f7a0000-0000-0000-0000-000000000000")
        with victim.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
