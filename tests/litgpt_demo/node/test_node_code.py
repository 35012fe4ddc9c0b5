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


def test_a_node_refuses_code_that_was_changed_and_ends_with_the_class_of_data(tmp_path: Path) -> None:
    address = shipped(tmp_path / "root", archive(member("train.py", b"mine")))
    Path(address).write_bytes(archive(member("train.py", b"evil")))
    codes, _ = ended_nodes(tmp_path / "d", "train.py", flags=("--code", address))
    assert codes == [41]
    assert "somebody has changed it" in report_of(tmp_path / "d")["message"]
    assert not (tmp_path / "d" / "node-0" / "code").exists()
