"""The lease of a run: one of several orchestrators has it, and loses it by its silence alone."""

import shutil
import time
from functools import partial
from pathlib import Path
from threading import Thread
from unittest.mock import Mock

import pytest
from waiting import until

from launcher.runs import lease as lease_module
from launcher.runs.index import INDEX, Index
from launcher.runs.lease import LEASE_TIMEOUT, Lease
from litgpt_demo.storage import Storage, open_storage

RUN = "gpt-0123456789"


clock_at = partial(Mock, return_value=1000.0)  # a monotonic clock that a test moves


@pytest.fixture
def root(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path))


def beats(root: Storage) -> int:
    """What the holder of the first term has counted to."""
    path = f"{INDEX}/{RUN}/lease/1.beat"
    return int(root.read(path)) if root.exists(path) else 0


def die(lease: Lease) -> None:
    """End its thread as a kill would, which tells nobody."""
    lease._stop.set()
    lease._beating.join()


def test_one_of_two_has_the_lease_and_the_other_knows_who(root: Storage) -> None:
    first, second = Lease(Index(root), RUN), Lease(Index(root), RUN)
    with first, second:
        assert first.take()
        assert not second.take()
        assert " on " in str(second.holder)
        assert first.take(), "who has it keeps it"
    with Lease(Index(root), RUN) as last:
        assert last.take(), "who leaves lets go of it at once"


def test_dead_holder_loses_the_lease_after_its_timeout(root: Storage) -> None:
    clock, first = clock_at(), Lease(Index(root), RUN)
    second = Lease(Index(root), RUN, clock=clock)
    assert first.take()
    until(lambda: beats(root))
    die(first)
    assert not second.take()
    clock.return_value += LEASE_TIMEOUT - 0.1
    assert not second.take()
    clock.return_value += 0.1
    with second:
        assert second.take()
        assert not first.take(), "who was only paused has lost it, and follows"


def test_live_holder_keeps_the_lease_however_long_others_wait(root: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "HEARTBEAT_INTERVAL", 0.01)
    clock = clock_at()
    with Lease(Index(root), RUN) as first, Lease(Index(root), RUN, clock=clock) as second:
        assert first.take()
        for _ in range(4):
            seen = beats(root)
            until(lambda seen=seen: beats(root) > seen)  # type: ignore[misc]
            assert not second.take()
            clock.return_value += LEASE_TIMEOUT - 1


def test_a_clock_that_jumps_by_an_hour_changes_nothing(root: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the day is never asked: neither a holder's that jumps nor an observer's ends or keeps a lease."""
    with Lease(Index(root), RUN) as first, Lease(Index(root), RUN, clock=clock_at()) as second:
        assert first.take()
        assert not second.take()
        real = time.time
        for hour in (3600, -3600):
            monkeypatch.setattr(time, "time", lambda hour=hour: real() + hour)
            assert first.take()
            assert not second.take()


def test_count_is_inherited_only_from_a_holder_seen_alive(root: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "HEARTBEAT_INTERVAL", 0.01)
    clock, first = clock_at(), Lease(Index(root), RUN, flow_run="theirs")
    follower = Lease(Index(root), RUN, flow_run="the follower's", clock=clock)
    newcomer = Lease(Index(root), RUN, clock=clock)
    assert first.take()
    assert not follower.take()
    seen = beats(root)
    until(lambda: beats(root) > seen)
    assert not follower.take()
    die(first)
    follower.take()
    clock.return_value += LEASE_TIMEOUT
    with follower, newcomer:
        assert follower.take()
        assert follower.inherited == "theirs"
        die(follower)
        newcomer.take()
        clock.return_value += LEASE_TIMEOUT
        assert newcomer.take(), "a command that is typed after the death begins a new count"
        assert newcomer.inherited is None


def test_follower_stops_with_the_leader(root: Storage) -> None:
    with Lease(Index(root), RUN) as first, Lease(Index(root), RUN) as follower, Lease(Index(root), RUN) as newcomer:
        assert first.take()
        first.release(stopped=3)
        assert not follower.take(unless_stopped_after=3)
        assert follower.stopped_after(3)
        assert not follower.stopped_after(2)
        assert newcomer.take(), "a new command was typed by somebody who knows"


def test_damaged_lease_files_do_not_hold_the_lease(root: Storage) -> None:
    """Whoever may write the bucket may have written it."""
    for run, damage in (("empty", b""), ("other", b'{"format": 1}'), ("long", b"\xff" * 70_000)):
        clock = clock_at()
        for name in ("1.json", "1.beat"):
            root.write(f"{INDEX}/{run}/lease/{name}", damage)
        with Lease(Index(root), run, clock=clock) as lease:
            assert not lease.take()
            clock.return_value += LEASE_TIMEOUT
            assert lease.take()


def test_look_that_outlives_its_orchestrator_takes_nothing(root: Storage) -> None:
    """The look has begun in a thread when the orchestrator ends: nobody would let go of what it took."""
    lease = Lease(Index(root), RUN)
    leaving = Thread(target=lease.__exit__)

    def close() -> None:
        leaving.start()
        leaving.join(0.1)  # which waits for this look, or has gone

    lease._restrict_permissions = close
    lease.take()
    leaving.join()
    with Lease(Index(root), RUN) as second:
        assert second.take()
    assert not lease.take()


def test_holder_notices_that_it_lost_the_lease(root: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was suspended, and another orchestrator took over; or the folder was deleted, and terms begin again."""
    monkeypatch.setattr(lease_module, "HEARTBEAT_INTERVAL", 0.01)
    folder = Path(root.local_path() or "") / INDEX / RUN / "lease"
    with Lease(Index(root), RUN) as suspended:
        assert suspended.take()
        (folder / "2.json").write_bytes((folder / "1.json").read_bytes())
        until(lambda: not suspended.is_held)
    shutil.rmtree(folder)
    with Lease(Index(root), RUN) as holder:
        assert holder.take()
        folder.rename(folder.with_name("deleted"))  # at once, for heartbeats write there meanwhile
        until(lambda: not holder.is_held)


def test_thread_of_an_earlier_term_drops_no_newer_term(root: Storage) -> None:
    with Lease(Index(root), RUN) as lease:
        assert lease.take()
        lease.release()
        assert lease.take()
        stuck = Mock(is_set=Mock(side_effect=[False, True]))
        lease._beat(1, stuck)
        assert lease.is_held
