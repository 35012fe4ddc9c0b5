"""Following the logs that nodes keep in a folder or in a bucket: every line whole and once, and nothing read twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import pytest
from bucket_emulator import bucket_emulator
from bucket_faults import FOREVER, Fault, FaultyBucket, faulty_bucket
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import PlatformUnreachable
from launcher.job import LogLine, LogPage
from launcher.platforms.log_files import PAGE, page_of
from litgpt_demo.metrics import parsed
from litgpt_demo.storage import LocalStorage, Position, Storage, open_storage
from litgpt_demo.storage.base import MOST_READ

LONG = b"".join(b"line %d\n" % number for number in range(20_000))


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultyBucket]:
    with bucket_emulator("followed-logs") as upstream, faulty_bucket(upstream) as proxy:
        yield proxy


@pytest.fixture
def bucket(proxy: FaultyBucket, monkeypatch: pytest.MonkeyPatch) -> Storage:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
    proxy.arm()
    return open_storage(f"gs://followed-logs/{uuid4().hex}")


@dataclass(frozen=True)
class CountingStorage(LocalStorage):
    """Counts the bytes that are read."""

    counted: tuple[list[int], ...] = ([],)

    def read(self, path: str, *, most: int = MOST_READ) -> bytes:
        return self._count(super().read(path, most=most))

    def read_on(self, path: str, position: Position, *, most: int = MOST_READ) -> tuple[Position, bytes]:
        begin, data = super().read_on(path, position, most=most)
        return begin, self._count(data)

    def _count(self, data: bytes) -> bytes:
        self.counted[0].append(len(data))
        return data


class Follower:
    """Looks at the logs of two nodes again and again, as a platform does that follows a job."""

    def __init__(self, attempt: Storage, read: Callable[[], int]) -> None:
        self.attempt, self._read, self._position = attempt, read, ""

    def look(self, *, ended: bool = False) -> tuple[list[str], int]:
        """The new lines of all nodes, and how many bytes were read for them."""
        before = self._read()
        page = page_of(self.attempt, 2, self._position, ended=ended)
        self._position = page.position
        return [str(line.text) for line in page.lines], self._read() - before


@pytest.fixture(params=["local", "bucket"])
def follower(request: pytest.FixtureRequest, tmp_path: Path) -> Follower:
    if request.param == "bucket":
        proxy: FaultyBucket = request.getfixturevalue("proxy")
        return Follower(request.getfixturevalue("bucket"), lambda: proxy.downloaded)
    counted: list[int] = []
    return Follower(CountingStorage(root=str(tmp_path / "attempt"), counted=(counted,)), lambda: sum(counted))


def test_a_look_reads_what_was_added_and_nothing_of_a_log_that_is_as_it_was(follower: Follower) -> None:
    follower.attempt.write("node-0.log", LONG)
    lines, read = follower.look()
    assert (len(lines), read) == (20_000, len(LONG))
    assert follower.look() == ([], 0)
    follower.attempt.write("node-0.log", LONG + b"one more\n")
    assert follower.look() == (["one more"], len(b"one more\n"))
    assert follower.look() == ([], 0)


def test_lines_come_whole_and_once_and_the_end_of_a_job_ends_its_last_line(follower: Follower) -> None:
    follower.attempt.write("node-0.log", "é one\né tw".encode())
    follower.attempt.write("node-1.log", b"other")
    assert follower.look()[0] == ["é one"]
    follower.attempt.write("node-0.log", "é one\né two\nthr".encode())
    assert follower.look()[0] == ["é two"]
    assert follower.look(ended=True)[0] == ["thr", "other"]
    assert follower.look(ended=True) == ([], 0)


def test_a_log_that_is_begun_anew_is_read_from_its_beginning_however_long_it_has_become(follower: Follower) -> None:
    follower.attempt.write("node-0.log", LONG)
    follower.look()
    follower.attempt.write("node-0.log", b"a new life\n")
    assert follower.look() == (["a new life"], len(b"a new life\n"))
    follower.attempt.remove("node-0.log")
    assert follower.look() == ([], 0)
    follower.attempt.write("node-0.log", b"a third life\n" + LONG)
    lines, _ = follower.look()
    assert (lines[0], len(lines)) == ("a third life", 20_001)


def test_a_bucket_s_log_that_was_replaced_by_a_longer_one_is_known_by_its_checksum(bucket: Storage) -> None:
    follower = Follower(bucket, lambda: 0)
    bucket.write("node-0.log", b"the first life\n")
    follower.look()
    bucket.write("node-0.log", b"a second life, that nobody saw begin\nand its second line\n")
    assert follower.look()[0] == ["a second life, that nobody saw begin", "and its second line"]


def test_bytes_that_are_damaged_on_their_way_are_fetched_again_and_not_for_ever(
    proxy: FaultyBucket, bucket: Storage
) -> None:
    follower = Follower(bucket, lambda: proxy.downloaded)
    bucket.write("node-0.log", b"the first line\n")
    follower.look()
    bucket.write("node-0.log", b"the first line\nthe second line\n")
    proxy.arm(Fault(on="download", do="flip", times=2))
    assert follower.look()[0] == ["the second line"]
    bucket.write("node-0.log", b"the first line\nthe second line\nthe third line\n")
    proxy.arm(Fault(on="download", do="flip", times=FOREVER))
    with pytest.raises(PlatformUnreachable, match=r"node-0\.log cannot be read"):
        follower.look()


def test_of_a_log_larger_than_memory_only_the_new_line_is_read(tmp_path: Path) -> None:
    size = 1 << 42
    with (tmp_path / "node-0.log").open("wb") as log:
        log.truncate(size)  # takes no blocks
        log.seek(size)
        log.write(b"\nthe new line\n")
    page = page_of(open_storage(str(tmp_path)), 1, json.dumps({0: [size, "00000000"]}), ended=False)
    assert [line.text for line in page.lines] == ["", "the new line"]


# --- whatever a node writes -------------------------------------------------------------------------------------------


def pages(attempt: Storage, nodes: int = 1) -> Iterator[LogPage]:
    """The pages of a job that has ended, to the last."""
    position, more = "", True
    while more:
        page = page_of(attempt, nodes, position, ended=True)
        yield page
        position, more = page.position, page.more


@given(st.binary(max_size=3000))
def test_any_bytes_are_lines_of_text(content: bytes) -> None:
    with TemporaryDirectory() as folder:
        attempt = open_storage(folder)
        attempt.write("node-0.log", content)
        [page] = pages(attempt)
        texts = [line.text for line in page.lines]
    assert len(texts) == len(content.removesuffix(b"\n").split(b"\n")) * bool(content)
    for text in texts:
        text.encode()
        parsed(text)


def test_a_line_without_end_comes_in_pieces_and_nothing_of_it_is_lost(tmp_path: Path) -> None:
    place = open_storage(str(tmp_path))
    place.write("node-0.log", b"begin\n" + b"x" * (3 * PAGE) + b"\nend\n")
    seen = list(pages(place))
    assert max(sum(len(line.text) for line in page.lines) for page in seen) <= PAGE
    texts = [line.text for page in seen for line in page.lines]
    assert (texts[0], texts[-1]) == ("begin", "end")
    assert "".join(texts[1:-1]) == "x" * (3 * PAGE)


def test_a_node_that_floods_its_log_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    attempt = open_storage(str(tmp_path))
    attempt.write("node-0.log", b"flood\n" * PAGE)
    attempt.write("node-1.log", b"here I am\n")
    first = page_of(attempt, 2, "", ended=False)
    assert first.more
    assert LogLine(1, "here I am") in first.lines
