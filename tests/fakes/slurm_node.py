"""The first node of a Slurm job: it runs a batch script, with programs of its own in place of Slurm's and of python."""

import os
import subprocess
from pathlib import Path

_PROGRAMS = {
    "scontrol": 'case "$1 $2" in "show hostnames") echo n0;; update*) printf "%s\\n" "$@" > "$NODE/updated";; esac',
    "scancel": "",
    "python": "exit 0",
    "apptainer": "",
    # What it starts is a shell's line of the script too. It sees the environment of the nodes.
    "srun": """
if [ "$1" = --help ]; then echo "  --container-image=image"; exit; fi
env > "$NODE/environment"
while [ "$1" != bash ]; do shift; done
exec "$@"
""",
}


class SlurmNode:
    """Runs scripts in a folder. `programs` are bodies of shell scripts that stand in for programs."""

    def __init__(self, folder: Path, **programs: str) -> None:
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        for name, body in {**_PROGRAMS, **programs}.items():
            (file := folder / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
            file.chmod(0o755)

    def run(self, script: str) -> int:
        """Run a batch script; return its exit code."""
        env = dict.fromkeys(("HOME", "NODE"), str(self.folder)) | {"PATH": f"{self.folder}/bin:{os.environ['PATH']}"}
        env |= {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n0", "SLURMD_NODENAME": "n0"}
        # As slurmd does: the script is a file, and its output is /dev/null.
        (file := self.folder / "script").write_text(script)
        return subprocess.run(["bash", file], cwd=self.folder, env=env, capture_output=True, check=False).returncode

    @property
    def comment(self) -> str:
        """The job's comment, where the script has changed it."""
        update = (self.folder / "updated").read_text().splitlines()
        return update[-1].removeprefix("comment=")

    @property
    def environment(self) -> dict[str, str]:
        """The environment that the nodes had."""
        lines = (self.folder / "environment").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)
