"""Access: may we do what the run is going to do? Asked of the platform, and with a real write to the root.

What gives access stays in the memory of the process that asks; a step that needs it asks for itself.
"""

from __future__ import annotations

import os
import socket

from launcher.config import RunConfig, ScriptConfig
from launcher.errors import LoginProblem
from litgpt_demo.errors import Unreachable, UserError
from litgpt_demo.storage import open_storage

PROBE = ".access-check"


def check_access(config: RunConfig | ScriptConfig) -> str:
    """Write a small file under the root and remove it, and reach the platform; returns what was found, in words.

    Raises:
        LoginProblem: the root may not be written, or the platform does not let us in.
        DiskFull, NodeError, NetworkError, Unreachable: as the storage has it; a full or silent one refuses nobody.
        PlatformUnreachable: the platform does not answer.
    """
    storage = open_storage(config.root)
    probe = f"{PROBE}-{socket.gethostname()}-{os.getpid()}"
    try:
        storage.write(probe, b"train-litgpt was here to see whether it may write\n")
        storage.remove(probe)
    except Unreachable:
        raise
    except (UserError, OSError) as error:
        raise LoginProblem(f"root={config.root} cannot be written: {error}") from error
    return f"{storage.address()} can be written, {config.platform.open().check_access()}"
