"""Jobs whose nodes keep logs in their attempt's directory, each read on from where the last look at it ended."""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
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
"""Bytes or characters of logs that a page holds, more only where many nodes have their least share."""
_LEAST = 1 << 18
_POSITIONS = TypeAdapter(
    dict[int, tuple[Annotated[int, Field(ge=0, le=2**53)], Annotated[str, Field(pattern="^[0-9a-f]{8}$")]]]
)
"""The bytes of each node's log that were read, and their checksum.

A position comes back from the run index, where nodes can write. A malformed one is a ValueError.
"""


@dataclass(frozen=True)
class KeptJob:
    """The content of a job's id where the platform forgets jobs: enough to find it, and what its nodes have left."""

    platform: ClassVar[str]
    form: ClassVar[str]
    """How its ids begin: a scheme, and the kind of place that follows."""

    place: str
    name: str
    nodes: int
    directory: str

    @property
    def job_id(self) -> JobId:
        scheme, kept = self.form.partition(":")[0], quote(self.directory, safe="/:")
        return JobId(f"{scheme}://{self.place}/{self.name}?nodes={self.nodes}&kept={kept}")

    @classmethod
    def of(cls, job_id: JobId) -> Self:
        what = f"{job_id!r} is no job of {cls.platform}; ids look like {cls.form}/name?nodes=2&kept=…"
        try:
            url = urlsplit(job_id)
            query = parse_qs(url.query)
        except ValueError as error:
            raise ConfigProblem(what) from error
        nodes, kept = (query.get(name, [""])[0] for name in ("nodes", "kept"))
        if url.scheme != cls.form.partition(":")[0] or not re.fullmatch("[0-9]{1,5}", nodes) or not kept:
            raise ConfigProblem(what)
        return cls(url.netloc, url.path.strip("/"), int(nodes), kept)

    def is_named(self, job_id: JobId) -> bool:
        """Return whether an id is this job's; one that is damaged or forged is not."""
        with suppress(ConfigProblem):
            return self.of(job_id) == self
        return False


def page_of(attempt: Storage, nodes: int, position: str, *, ended: bool) -> LogPage:
    """Return the lines that the nodes' logs have had added since `position`, node by node; PlatformUnreachable where
    one cannot be read. `ended` says if the job had ended before this look: then a line without its end is a line too.
    """
    positions = {node: ReadCursor(*place) for node, place in _POSITIONS.validate_json(position or "{}").items()}
    lines: list[LogLine] = []
    share, more = max(_LEAST, PAGE // max(nodes, 1)), False  # one that floods silences no other
    for node in range(nodes):
        name = f"node-{node}.log"
        try:
            # A pod that comes back moves the log of its last life away; the new one is read from its beginning.
            begin, fresh = attempt.read_from(name, positions.get(node, ReadCursor()), most=share)
        except FileNotFoundError:
            begin, fresh = ReadCursor(), b""
        except TrainLitgptError as error:
            raise PlatformUnreachable(f"{attempt.address(name)} cannot be read: {error}") from error
        full = len(fresh) == share
        if full or not ended:
            # A line that fills a page by itself goes out in pieces: nobody waits for its end, and it is never held.
            fresh = fresh[: fresh.rfind(b"\n") + 1] or (fresh if full else b"")
        positions[node], more = begin.after(fresh), more or full
        text = fresh.decode(errors="replace").removesuffix("\n")
        lines += (LogLine(node, terminal_text(line)) for line in (text.split("\n") if fresh else ()))
    return LogPage(tuple(lines), json.dumps({node: astuple(place) for node, place in positions.items()}), more)


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
