"""Secrets in an error, for whoever gets hold of it: in its words, its causes, and the variables of its traceback."""

import base64
import json
import traceback
from collections.abc import Iterator
from urllib.parse import quote


def leaks(error: BaseException | str, *secrets: str) -> list[str]:
    """The secrets that stand in a text, or in an error as reports show it: as they are, or as requests write them."""
    text = error if isinstance(error, str) else _shown(error)
    return [secret for secret in secrets if any(written in text for written in _ways(secret))]


def _shown(error: BaseException) -> str:
    """As a crash report with local variables has it, but for those of the tests, which know the secrets."""
    frames = traceback.TracebackException.from_exception(error, capture_locals=True)
    _forget_tests(frames)
    return f"{error}\n{error!r}\n{''.join(frames.format())}"


def _forget_tests(report: traceback.TracebackException) -> None:
    for frame in report.stack:
        if "/tests/" in frame.filename:
            frame.locals = None
    for behind in (report.__cause__, report.__context__):
        if behind is not None:
            _forget_tests(behind)


def _ways(secret: str) -> Iterator[str]:
    yield from (secret, quote(secret, safe=""), json.dumps(secret)[1:-1])
    for begin in range(3):  # where in a text it begins, which base64 mixes with what stands before
        yield base64.b64encode(b"x" * begin + secret.encode()).decode()[4:-4]
