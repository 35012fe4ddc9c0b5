"""A user's own code on the node: fetched by its hash, unpacked as plain files, and nothing else believed."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from nodes import ended_nodes, report_of

from litgpt_demo.errors import DataError
from litgpt_demo.node import code
from litgpt_demo.node.code import fetch_code


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member, content in members:
            tar.addfile(member, io.BytesIO(content))
    return sink.getvalue()


def member(name: str, content: bytes = b"", **changes: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for attribute, value in changes.items():
        setattr(info, attribute, value)
    return info, content


def shipped(folder: Path, content: bytes) -> str:
    """The address of an archive under its hash."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{sha256(content).hexdigest()}.tar"
    path.write_bytes(content)
    return str(path)


def test_more_bytes_or_files_than_code_has_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = shipped(tmp_path / "root", archive(*(member(f"{number}.py") for number in range(4))))
    monkeypatch.setattr(code, "MOST_FILES", 3)
    with pytest.raises(DataError, match="unpacks to more than 3 files"):
        fetch_code(address, tmp_path / "code")
    monkeypatch.setattr(code, "MOST_ARCHIVE", 1000)
    with pytest.raises(DataError, match="at most 1,000 are read"):
        fetch_code(address, tmp_path / "code")


HOSTILE = {
    "a path out of the folder": archive(member("../escaped", b"x")),
    "a file through a link": archive(member("link", type=tarfile.SYMTYPE, linkname=".."), member("link/escaped", b"x")),
    "a hard link": archive(member("link", type=tarfile.LNKTYPE, linkname="../secret")),
    "a device": archive(member("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3)),
    "more than fits": archive(member("big", pax_headers={"GNU.sparse.major": "1", "GNU.sparse.realsize": str(10**12)})),
    "a tar cut short": archive(member("train.py", b"x" * 2000))[:1000],
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_archive_is_a_data_error_and_leaves_nothing_outside(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "secret").write_text("mine")
    with pytest.raises(DataError):
        fetch_code(shipped(tmp_path / "root", content), tmp_path / "code")
    assert {path.name for path in tmp_path.iterdir()} == {"secret", "root", "code"}
    assert not any(path.is_symlink() for path in (tmp_path / "code").rglob("*"))


def test_unpacked_code_is_its_owners_alone_and_goes_and_what_the_program_wrote_beside_it_stays(tmp_path: Path) -> None:
    content = archive(member("lib/tool", b"#!/bin/sh", mode=0o755), member("table.csv", b"a,b\n"))
    code = fetch_code(shipped(tmp_path / "root", content), tmp_path / "code")
    assert os.access(tmp_path / "code" / "lib" / "tool", os.X_OK)
    assert stat.S_IMODE((tmp_path / "code").stat().st_mode) == 0o700
    (tmp_path / "code" / "lib" / "__pycache__").mkdir()
    (tmp_path / "code" / "lib" / "__pycache__" / "second.pyc").touch()
    (tmp_path / "code" / "weights.pt").touch()
    with (tmp_path / "code" / "table.csv").open("a") as table:
        table.write("1,2\n")
    code.remove()
    assert {path.name for path in (tmp_path / "code").iterdir()} == {"weights.pt", "table.csv"}


# The last word of the program is a folder in which the ranks say how far they are.
RANKS = b"""
import os, pathlib, random, sys, time
place, rank = pathlib.Path(sys.argv[-1]), os.environ["RANK"]
size = pathlib.Path(os.environ["LITGPT_DATASET"], "train.bin").stat().st_size
print(f"rank {rank} reads {size} bytes, is told {sys.argv[1:-1]}, imports {random.WHOSE}", flush=True)
(place / rank).touch()
while not ((place / "0").exists() and (place / "1").exists()):
    time.sleep(0.01)
if rank == "1":
    raise SystemExit(41)
time.sleep(600)
"""


def test_a_node_brings_data_and_code_and_ends_with_the_class_of_the_rank_that_failed(
    tmp_path: Path, tiny_dataset: Path
) -> None:
    """Modules of the user's that are called as two of Python's are meant for ranks; torchrun imports both itself."""
    content = archive(member("train.py", RANKS), member("random.py", b"WHOSE = 'mine'"), member("queue.py", b"1 / 0"))
    code = shipped(tmp_path / "root", content)
    directory, kept, place = tmp_path / "d", tmp_path / "kept", tmp_path / "place"
    place.mkdir()
    flags = ("--stage", str(tiny_dataset), "--code", code, "--log-uri", str(kept))
    # --run is how torchrun's own --run-path may be abbreviated, were the program's options not kept from it.
    program = ("train.py", "--run", "x", "--", "-m", str(place))
    codes, (said,) = ended_nodes(directory, *program, processes=2, flags=flags)
    assert codes == [41], said
    size = (tiny_dataset / "train.bin").stat().st_size
    words = f"reads {size} bytes, is told ['--run', 'x', '--', '-m'], imports mine"
    assert {f"[rank{rank}]:rank {rank} {words}" for rank in (0, 1)} <= set(said.splitlines())
    assert "node 0 ends with 41 (data error)" in said
    assert (kept / "node-0.log").read_text() == said
    assert len(list(kept.glob("node-0/ranks/*/attempt_0/*/stdout.log"))) == 2
    told = report_of(kept)
    assert told == report_of(directory)
    assert [(rank["rank"], rank["bystander"]) for rank in told["ranks"]] == [(1, False), (0, True)]
    assert not (directory / "node-0" / "data").exists()
    assert not (directory / "node-0" / "code").exists()


def test_a_node_refuses_code_that_was_changed_and_ends_with_the_class_of_data(tmp_path: Path) -> None:
    address = shipped(tmp_path / "root", archive(member("train.py", b"mine")))
    Path(address).write_bytes(archive(member("train.py", b"evil")))
    codes, _ = ended_nodes(tmp_path / "d", "train.py", flags=("--code", address))
    assert codes == [41]
    assert "somebody has changed it" in report_of(tmp_path / "d")["message"]
    assert not (tmp_path / "d" / "node-0" / "code").exists()
