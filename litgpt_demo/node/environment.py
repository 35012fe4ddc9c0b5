"""The environment of a node's ranks: the platform's, the network's scripts, its variables, and the user's own last."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from litgpt_demo.errors import NodeError, UserError
from litgpt_demo.node import gpu
from litgpt_demo.node.network import NodeNetwork
from litgpt_demo.node.roce import find_cards
from litgpt_demo.storage.private import make_temporary

GRACE = "LITGPT_GRACE"
"""The environment variable of a node's ranks with the seconds that they have to save when they are asked to leave."""

# Source the scripts one after the other, and write down what came of it. A script that cannot do its work exits, and
# takes the shell with it; the status of its last line means nothing. What it prints goes to the node's log.
_SOURCE = 'target="$1"; shift; for script in "$@"; do . "$script"; done; env -0 > "$target"'

# bash's own, which a rank has no use for.
_OF_BASH = frozenset(("_", "SHLVL", "PWD", "OLDPWD"))


def of_network(network: NodeNetwork, environ: Mapping[str, str], *, root: Path = Path("/")) -> dict[str, str]:
    """`environ` as the network wants it.

    What a script sets it sets whatever was set before: so the profile's variables that must hold come after, and the
    user's last of all.

    Raises:
        NodeError: a script is not there, or a card has no usable address.
        UserError: a script fails, or the image has no bash to run it with.
    """
    mine = _with_libraries(environ, network.library_paths)
    if network.scripts:
        mine = _with_libraries(sourced(network.scripts, mine), network.library_paths)
    mine |= network.environment | network.overrides
    if network.hca is not None:
        mine |= rdma(network, mine, root / "sys")
    return mine


def _with_libraries(environ: Mapping[str, str], folders: Sequence[str]) -> dict[str, str]:
    """LD_LIBRARY_PATH with these folders first, each of them once."""
    there = [folder for folder in environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    path = ":".join(dict.fromkeys((*folders, *there)))
    return {**environ, "LD_LIBRARY_PATH": path} if path else dict(environ)


def sourced(scripts: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The environment that shell scripts leave; see `of_network` for its errors."""
    if missing := [script for script in scripts if not Path(script).is_file()]:
        raise NodeError(
            f"the network's script {', '.join(missing)} is not on this node; see whether the installer's DaemonSet is "
            "ready here, and its folder mounted"
        )
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "environment"
        try:
            command = ["bash", "-c", _SOURCE, "source", str(target), *scripts]
            done = subprocess.run(command, env=dict(environ), check=False)
        except FileNotFoundError as error:
            raise UserError(f"the network's scripts need bash, and the image has none ({error}); install it") from error
        if done.returncode != 0 or not target.exists():
            raise UserError(
                f"the network's scripts {', '.join(scripts)} ended with {done.returncode}; what they printed is above"
            )
        entries = target.read_bytes().decode(errors="surrogateescape").split("\0")
    pairs = (entry.partition("=") for entry in entries if "=" in entry)
    return {name: value for name, _, value in pairs if name not in _OF_BASH or name in environ}


def rdma(network: NodeNetwork, environ: Mapping[str, str], sys: Path) -> dict[str, str]:
    """NCCL's card and GID index, where the user has not set them; for errors see `find_cards`."""
    if "NCCL_IB_GID_INDEX" in environ:
        return {}
    prefix = environ.get("NCCL_IB_HCA") or network.hca or ""
    if not re.fullmatch(r"[A-Za-z0-9_]+", prefix):  # a list of cards or an exclusion; its author knows their indices
        return {}
    cards = find_cards(sys, prefix, network.interfaces)
    # `=` makes the names exact: `mlx5_1` alone would mean mlx5_10 as well.
    return {"NCCL_IB_HCA": f"={','.join(cards.names)}", "NCCL_IB_GID_INDEX": str(cards.index)}


# --- what torch.compile leaves for the next start ---------------------------------------------------------------------

_COMPILED = "TORCHINDUCTOR_CACHE_DIR"


def with_compile_cache(environ: Mapping[str, str]) -> dict[str, str]:
    """Let torch.compile keep the code that it makes, and loads again, where no other user of this machine can write.

    Its own choice, `torchinductor_<user>` in the temporary folder, is taken whoever made it
    (torch/_inductor/runtime/cache_dir_utils.py, of 2.13).

    Raises:
        UserError: another user could change the folder.
    """
    mine = dict(environ)
    with suppress(FileNotFoundError):  # there is no temporary folder, and so no cache
        if _COMPILED not in mine:
            mine[_COMPILED] = str(make_temporary("torchinductor"))
    return mine


def require_executable_cache(environ: Mapping[str, str]) -> None:
    """Check that code which torch.compile makes can be run from where it is kept.

    Raises:
        UserError: that is on a file system mounted noexec.
    """
    folder = Path(environ.get(_COMPILED) or tempfile.gettempdir()).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if os.statvfs(there).f_flag & getattr(os, "ST_NOEXEC", 0):
        raise UserError(
            f"train.compile makes programs and keeps them in {folder}, on a file system from which none may be run "
            f"(noexec); set TMPDIR or {_COMPILED} to a folder elsewhere, or train.compile=none"
        )


def with_libcuda(environ: Mapping[str, str]) -> dict[str, str]:
    """Let triton and the linker find libcuda where only LD_LIBRARY_PATH leads to it, as on GKE (triton#2507).

    triton asks TRITON_LIBCUDA_PATH first, then the loader's cache; a compiler asks LIBRARY_PATH.
    """
    mine = dict(environ)
    if gpu.libcuda_is_cached() or (folder := gpu.libcuda_folder(environ)) is None:
        return mine
    if os.geteuid() == 0:
        # Folders apart: ldconfig takes `a:b` for one folder, and says nothing. Failing is no harm: see below.
        subprocess.run(["/sbin/ldconfig", folder], capture_output=True, check=False)
    mine.setdefault("TRITON_LIBCUDA_PATH", folder)
    mine["LIBRARY_PATH"] = ":".join(dict.fromkeys((*filter(None, environ.get("LIBRARY_PATH", "").split(":")), folder)))
    return mine
