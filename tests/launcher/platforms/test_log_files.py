"""Following the logs that nodes keep in a folder or in a bucket: every line whole and once, and nothing read twice."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from bucket_faults import FOREVER, FailureClass, FaultyBucket
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import PlatformUnreachable
from launcher.job import LogLine
from launcher.platforms.log_files import PAGE, page_of
from litgpt_demo.metrics import from_log_line
from litgpt_demo.storage import Storage, open_storage

LONG = b"".join(b"line %d\n" % number for number in range(20_000))


class Follower:
    """Looks at the logs of two nodes again and again, as a platform does that follows a job."""

    def __init__(self, attempt: Storage) -> None:
        self.attempt, self._position = attempt, ""

    def look(self, *, ended: bool = False) -> list[str]:
        """The new lines of all nodes."""
        page = page_of(self.attempt, 2, self._position, ended=ended)
        self._position = page.position
        return [line.text for line in page.lines]


@pytest.fixture
def follower(root: str) -> Follower:
    return Follower(open_storage(root))


def test_page_reads_only_the_added_bytes(proxy: FaultyBucket, bucket: Storage) -> None:
    """An unchanged log is not read at all."""
    follower = Follower(bucket)
    bucket.write("node-0.log", LONG)
    assert len(follower.look()) == 20_000
    before = proxy.downloaded
    assert follower.look() == []
    bucket.write("node-0.log", LONG + b"one more\n")
    assert follower.look() == ["one more"]
    assert follower.look() == []
    assert proxy.downloaded - before == len(b"one more\n")


def test_lines_are_complete_and_the_jobs_end_ends_the_last_one(follower: Follower) -> None:
    """Each line is returned once."""
    follower.attempt.write("node-0.log", "é one\né tw".encode())
    follower.attempt.write("node-1.log", b"other")
    assert follower.look() == ["é one"]
    follower.attempt.write("node-0.log", "é one\né two\nthr".encode())
    assert follower.look() == ["é two"]
    assert follower.look(ended=True) == ["thr", "other"]
    assert follower.look(ended=True) == []


def test_replaced_log_is_read_from_its_beginning(follower: Follower) -> None:
    """Its length does not matter."""
    follower.attempt.write("node-0.log", LONG)
    follower.look()
    follower.attempt.write("node-0.log", b"a new life\n")
    assert follower.look() == ["a new life"]
    follower.attempt.remove("node-0.log")
    assert follower.look() == []
    follower.attempt.write("node-0.log", b"a third life\n" + LONG)
    assert follower.look()[0] == "a third life"


def test_damaged_bytes_are_fetched_again_but_not_forever(proxy: FaultyBucket, bucket: Storage) -> None:
    bucket.write("node-0.log", b"the first line\n")
    proxy.arm(FailureClass(on="download", do="flip", times=2))
    assert Follower(bucket).look() == ["the first line"]
    proxy.arm(FailureClass(on="download", do="flip", times=FOREVER))
    with pytest.raises(PlatformUnreachable, match=r"node-0\.log cannot be read"):
        Follower(bucket).look()


def test_page_of_a_huge_log_reads_only_the_new_line(tmp_path: Path) -> None:
    size = 1 << 42
    with (tmp_path / "node-0.log").open("wb") as log:
        log.truncate(size)  # takes no blocks
        log.seek(size)
        log.write(b"\nthe new line\n")
    page = page_of(open_storage(str(tmp_path)), 1, json.dumps({0: [size, "00000000"]}), ended=False)
    assert [line.text for line in page.lines] == ["", "the new line"]


# --- whatever a node writes -------------------------------------------------------------------------------------------


@given(st.binary(max_size=3000))
def test_any_bytes_are_lines_of_text(content: bytes) -> None:
    with TemporaryDirectory() as folder:
        attempt = open_storage(folder)
        attempt.write("node-0.log", content)
        texts = [line.text for line in page_of(attempt, 1, "", ended=True).lines]
    assert len(texts) == len(content.removesuffix(b"\n").split(b"\n")) * bool(content)
    for text in texts:
        text.encode()
        from_log_line(text)


def test_endless_line_comes_in_pieces_and_blocks_no_other_node(tmp_path: Path) -> None:
    place = open_storage(str(tmp_path))
    place.write("node-0.log", b"begin\n" + b"x" * (3 * PAGE) + b"\nend\n")
    place.write("node-1.log", b"here I am\n")
    page = page_of(place, 2, "", ended=True)
    assert LogLine(1, "here I am") in page.lines
    texts = [line.text for line in page.lines if line.node == 0]
    while page.more:
        page = page_of(place, 2, page.position, ended=True)
        assert sum(len(line.text) for line in page.lines) <= PAGE
        texts += [line.text for line in page.lines]
    assert (texts[0], texts[-1]) == ("begin", "end")
    assert "".join(texts[1:-1]) == "x" * (3 * PAGE)
