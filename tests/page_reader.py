"""A reader of a page of docs/: writes its files, types its commands, and compares what they print with the page."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]
BLOCK = re.compile(
    r'(?:^<!-- not run: ([^\n]+) -->\n)?^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL
)
HASHED = re.compile(r"\b([a-z-]+)-[0-9a-f]{10}\b|(?<=output/runs/)RUN\b")
LINKED = ("deployments", "examples")  # folders of the checkout that pages name
PROGRAM = "$ python make_"  # other console lines of a page are git, pip and PATH
INTERRUPT = "^C"
HAS_SCORES = find_spec("lm_eval") is not None


def stable_words(line: str) -> set[str]:
    """Return the words of a line that do not differ between two runs: no numbers, paths, hashes or units."""
    stripped = (word.strip(".,:;()`") for word in line.split())
    return {word for word in stripped if re.fullmatch(r"[A-Za-z'-]{3,}|✓", word) and word != "min"}


def is_live(line: str) -> bool:
    """Report whether a terminal removes the line later, as a progress bar."""
    return "━" in line


def missing_lines(shown: str, printed: str) -> list[str]:
    """Return the lines of a page that no printed line contains, numbers aside."""
    lines = [line for line in shown.splitlines() if not is_live(line) and line.strip("… ") not in {"", "^C"}]
    stable = [stable_words(line) for line in printed.splitlines()]
    return [line for line in lines if not any(stable_words(line) <= found for found in stable)]


class Reader:
    """Follows a page in a folder of its own, and keeps the output of each command."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder, self.printed = folder, dict[str, str]()
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self._environment = {**os.environ, "PREFECT_HOME": str(home), "COLUMNS": "120", "PATH": path}
        for name in LINKED:
            (folder / name).symlink_to(CHECKOUT / name)

    def follow(self, page: str, *, instead: dict[str, str] | None = None, codes: dict[str, int] | None = None) -> None:
        """Write the titled blocks of a page, type its commands, and compare their output with the next block.

        A command in `instead` is replaced; the replacement "" leaves it out, with its output. A command that contains
        a key of `codes` ends with that exit code. A block that is marked as not run is left out.
        """
        blocks = [*BLOCK.findall((CHECKOUT / page).read_text(encoding="utf-8")), ("", "", "", "")]
        for (mark, kind, name, block), (_, next_kind, next_name, output) in pairwise(blocks):
            if mark:
                continue
            block = HASHED.sub(self._real_name, block)
            if "." in name:
                (self.folder / name).parent.mkdir(exist_ok=True)
                (self.folder / name).write_text(block, encoding="utf-8")
            typed = [(instead or {}).get(command, command) for command in _commands(kind, block)]
            shown = output if typed and all(typed) and next_kind == "text" and not next_name else ""
            printed = "".join([self.type(command, shown, codes) for command in typed if command])
            if HAS_SCORES or "evaluate" not in block:
                assert missing_lines(shown, printed) == [], printed

    def _real_name(self, shown: re.Match[str]) -> str:
        """Return the run or dataset of this folder for a name of the page, whose hash is another one."""
        found = [*(self.folder / "output").glob(f"{'*' if shown[1] else 'runs'}/{shown[1] or '*'}-*")]
        return found[0].name if found else shown[0]

    def type(self, command: str, shown: str = "", codes: dict[str, int] | None = None) -> str:
        """Return the output of a command. Ctrl-C is pressed as often, and at the step, as the shown output has it."""
        process = subprocess.Popen(
            shlex.split(command),
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        interrupts = shown.splitlines().count(INTERRUPT)
        expected = next((code for part, code in (codes or {}).items() if part in command), 0)
        if "evaluate" in command and not HAS_SCORES:
            expected = 40
        if interrupts:
            [bar] = filter(is_live, shown.splitlines())
            step, expected = int(re.findall(r"(\d+)/", bar)[-1]), 130
        printed = ""
        with process:
            for line in process.stdout or ():
                printed += line.replace(f"{self.folder}/", "")
                reached = re.match(r" *step (\d+)/", line)
                if interrupts and ((reached and int(reached[1]) >= step) or "press Ctrl-C once more" in line):
                    os.killpg(process.pid, signal.SIGINT)
                    interrupts -= 1
        assert process.returncode == expected, printed
        assert "Warning" not in printed
        self.printed[command] = printed
        return printed


def _commands(kind: str, block: str) -> Iterator[str]:
    """Yield the commands of a block. Only the page's own programs are typed of a console block."""
    for line in block.splitlines():
        if kind == "sh":
            yield shlex.join(shlex.split(line, comments=True))
        elif kind == "console" and line.startswith(PROGRAM):
            yield line.removeprefix("$ ")
