"""Logs in the attempt's directory: pages of the lines that the nodes have added, and the ids of such jobs."""

from __future__ import annotations

import json
import re
import time
from dataclasses import astuple, dataclass
from typing import Annotated, ClassVar, Self
from urllib.parse import parse_qs, quote, urlsplit

from pydantic import Field, TypeAdapter

from launcher.errors import ConfigProblem, PlatformUnreachable
from launcher.formatting import terminal_text
from launcher.job import JobId, LogLine, LogPage
from litgpt_demo.errors import TrainLitgptError
from litgpt_demo.runs import node_reports
from litgpt_demo.storage import ReadCursor, Storage

PAGE = 4 << 20
"""Bytes or characters of logs in a page. With many nodes it is larger: each has its least share."""
_LEAST = 1 << 18
_POSITIONS = TypeAdapter(
    dict[int, tuple[Annotated[int, Field(ge=0, le=2**53)], Annotated[str, Field(pattern="^[0-9a-f]{8}$")]]]
)
"""The bytes of each node's log that were read, and their checksum.

Nodes can write to the run index, which stores a position. A malformed one is a ValueError.
"""


@dataclass(frozen=True)
class JobRef:
    """A job's id on a platform that forgets jobs: it finds the job, and the files that its nodes have left."""

    platform: ClassVar[str]
    scheme: ClassVar[str]

    scope: str
    """The project or login node, which has the name."""
    name: str
    nodes: int
    directory: str

    @property
    def job_id(self) -> JobId:
        directory = quote(self.directory, safe="/:")
        return JobId(f"{self.scheme}://{self.scope}/{self.name}?nodes={self.nodes}&kept={directory}")

    @classmethod
    def of(cls, job_id: JobId) -> Self:
        what = f"{job_id!r} is not a job of {cls.platform}; ids look like {cls.scheme}://…/name?nodes=2&kept=…"
        try:
            url = urlsplit(job_id)
            query = parse_qs(url.query)
        except ValueError as error:
            raise ConfigProblem(what) from error
        nodes, directory = (query.get(name, [""])[0] for name in ("nodes", "kept"))
        if url.scheme != cls.scheme or not re.fullmatch("[0-9]{1,5}", nodes) or not directory:
            raise ConfigProblem(what)
        return cls(url.netloc, url.path.strip("/"), int(nodes), directory)


def page_of(attempt: Storage, nodes: int, position: str, *, ended: bool) -> LogPage:
    """Return the lines that the nodes have added to their logs since `position`, node by node. If the job had `ended`
    before this look, an incomplete line is a line too."""
    positions = {node: ReadCursor(*read) for node, read in _POSITIONS.validate_json(position or "{}").items()}
    lines: list[LogLine] = []
    share, more = max(_LEAST, PAGE // max(nodes, 1)), False  # a node that floods its log silences no other node
    for node in range(nodes):
        name = f"node-{node}.log"
        try:
            # A pod of the next life moves the log of the last one away. The new log is read from its beginning.
            begin, fresh = attempt.read_from(name, positions.get(node, ReadCursor()), most=share)
        except FileNotFoundError:
            begin, fresh = ReadCursor(), b""
        except TrainLitgptError as error:
            raise PlatformUnreachable(f"{attempt.address(name)} cannot be read: {error}") from error
        full = len(fresh) == share
        if full or not ended:
            complete = fresh[: fresh.rfind(b"\n") + 1]
            if complete or not full:
                fresh = complete  # a line that is longer than a page is returned in pieces
        positions[node], more = begin.after(fresh), more or full
        if fresh:
            text = fresh.decode(errors="replace").removesuffix("\n")
            lines += [LogLine(node, terminal_text(line)) for line in text.split("\n")]
    return LogPage(tuple(lines), json.dumps({node: astuple(read) for node, read in positions.items()}), more)


def exit_codes(attempt: Storage, *, nodes: int, patience: float) -> dict[int, int]:
    """Wait up to `patience` seconds for the reports of all `nodes`; return node number to exit code."""
    give_up_at = time.monotonic() + patience
    while True:
        try:
            codes = {report.node: report.exit_code for report in node_reports(attempt)}
        except TrainLitgptError as error:
            raise PlatformUnreachable(f"the run's directory {attempt.address()} cannot be read: {error}") from error
        if len(codes) >= nodes or time.monotonic() >= give_up_at:
            return codes
        time.sleep(0.2)
