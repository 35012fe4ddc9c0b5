"""The logs of a job's nodes, read on this machine or, where only the login node sees them, all by one command there."""

from __future__ import annotations

from launcher.job import LogPage
from launcher.platforms.log_files import log_name, page_of, positions_in, share_of_page
from launcher.platforms.slurm.shell import Shell
from litgpt_demo.storage import Position, open_storage


class _Fetched:
    """The bytes of the login node's files behind their positions."""

    def __init__(self, folder: str, found: dict[str, bytes]) -> None:
        self._folder, self._found = folder, found

    def address(self, path: str = "") -> str:
        return f"{self._folder}/{path}"

    def read_on(self, path: str, position: Position, *, most: int) -> tuple[Position, bytes]:
        """Return the bytes behind `position`, which is where they were asked for: Slurm only ever appends."""
        if (fresh := self._found.get(self.address(path))) is None:
            raise FileNotFoundError(self.address(path))
        return position, fresh[:most]


def node_logs(shell: Shell, folder: str, nodes: int, position: str, *, here: bool, ended: bool) -> LogPage:
    """Return what the nodes' logs have gained since `position`.

    Args:
        here: this machine sees the folder too.

    Raises:
        PlatformUnreachable: one cannot be read.
    """
    if here:
        return page_of(open_storage(folder), nodes, position, ended=ended)
    begin = positions_in(position)
    places = {f"{folder}/{log_name(node)}": begin.get(node, Position()).size for node in range(nodes)}
    return page_of(_Fetched(folder, shell.read(places, most=share_of_page(nodes))), nodes, position, ended=ended)
