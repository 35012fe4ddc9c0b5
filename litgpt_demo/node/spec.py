"""A node's command line as one word. Some launchers join the words of a command for a shell, some keep them, and what
is right for the one breaks on the other (Run:ai's CLI of 2.13 and of 2.18): a word without blanks, quotes and `$` is
the same under both.

    python -m litgpt_demo node --spec eyJhcmd2Ijpb…
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping, MutableMapping, Sequence

from litgpt_demo.errors import UserError

FLAG = "--spec"

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:./-]+")


def plain(word: str) -> bool:
    """Return True if every shell, and every flag that splits its value at commas, leaves the word as it is."""
    return _PLAIN.fullmatch(word) is not None


def pack(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Arguments, and variables to set before they are read, as one word of letters, digits, `-`, `_` and `=`."""
    document = {"argv": list(argv), "env": dict(environ)}
    return base64.urlsafe_b64encode(json.dumps(document, separators=(",", ":")).encode()).decode()


def unpack(argv: Sequence[str], environ: MutableMapping[str, str]) -> list[str]:
    """The arguments that a command line means, whose variables are then in `environ`; others are returned as they are.

    Raises:
        UserError: the word is no such one.
    """
    if not argv or argv[0] != FLAG:
        return list(argv)
    word = argv[1] if len(argv) == 2 else ""
    try:
        document = json.loads(base64.urlsafe_b64decode(word))
        words, variables = [*map(str, document["argv"])], dict(document["env"])
    except (binascii.Error, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{FLAG} {word[:40]!r}… is not what the launcher wrote ({type(error).__name__}: {error}); copy the whole "
            "command that `train-litgpt render` prints"
        ) from error
    environ.update(variables)
    return words
