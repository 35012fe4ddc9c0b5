"""Prefect's own settings where they cannot be read: which file has them, what is wrong, and how to go on without it."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def problem_of_prefects_settings(error: ValueError) -> str | None:
    """Return a message if Prefect could not read its settings, which it does when it is imported; None for others."""
    trace, theirs = error.__traceback__, False
    while trace is not None:
        theirs = theirs or trace.tb_frame.f_globals.get("__name__", "").startswith("prefect.settings")
        trace = trace.tb_next
    if not theirs:
        return None
    files = list(_files())
    broken = [str(file) for file, settings in files if settings is None]
    places = broken or [*(str(file) for file, _ in files), "a variable PREFECT_…"]
    return (
        f"Prefect cannot read its settings: {_words(error)}; mend {' or '.join(places)}. To go on without: "
        "PREFECT_PROFILES_PATH=/dev/null in front of the command for a profiles.toml, another folder for the others"
    )


def _files() -> Iterator[tuple[Path, Any]]:
    """Yield the files that are there and have settings of Prefect's, with what is in them; None for no TOML."""
    home = Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser()
    profiles = Path(os.environ.get("PREFECT_PROFILES_PATH") or home / "profiles.toml").expanduser()
    for file in (profiles, Path("prefect.toml").absolute(), Path("pyproject.toml").absolute()):
        try:
            found = tomllib.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            yield file, None
        except OSError:
            continue
        else:
            if file.name != "pyproject.toml" or "prefect" in found.get("tool", {}):
                yield file, found


def _words(error: ValueError) -> str:
    """Return one line of an error: of pydantic's, the first setting that it is about."""
    told = getattr(error, "errors", None)
    if told is None:
        return " ".join(str(error).split())
    first = told()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"  # what was given may be a secret
