"""Keep the bytecode of what the commands and their processes import.

Without it each process compiles torch, Prefect and transformers anew, which doubles its start: pip is told not to
compile (deployments/install.py), and where PYTHONDONTWRITEBYTECODE is set Python does not keep what it compiles either.
The modules that are imported are a sixth of those that are installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

# What one process imports, each list in a process of its own: the command with its flows, Prefect's server, and a rank
# with the collection of its model.
STARTS = [
    "cli.foreground, flows.server, flows.train_litgpt, flows.sweep_litgpt, matplotlib.backends.backend_svg",
    "prefect.server.api.server, prefect.cli, uvicorn",
    "litgpt_demo.training.loop, torch.distributed.run, litgpt_demo.export.models as making; making.load_libraries()",
]


def main(starts: Sequence[str]) -> int:
    """Import everything once, side by side; return the first exit code that is not 0."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    imports = [subprocess.Popen([sys.executable, "-c", f"import {names}"], env=environment) for names in starts]
    return next((code for code in [started.wait() for started in imports] if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or STARTS))
