"""Commands and files of the machine that speaks to Slurm: this one, or a login node through the user's own ssh.

The user's ~/.ssh/config decides on names, ports, users, keys and jump hosts. What is added here lets nothing ask a
question (nobody is there to answer it), believes no host key that is not known already, and keeps one connection open,
so that a look costs no new handshake: https://man.openbsd.org/ssh_config.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, NoReturn

from launcher.errors import ConfigProblem, LoginProblem, NotInstalled, PlatformUnreachable
from launcher.platforms.slurm.settings import HOST
from litgpt_demo.errors import words_of

SSH = "TRAIN_LITGPT_SSH"
"""The environment variable with another ssh command, such as `ssh -F /etc/train-litgpt/ssh_config`. It is no setting:
settings come back from records that nodes may write, and an ssh configuration names programs to run."""

NO_COMMAND = 127
"""The exit code of a shell that finds no such program."""

_CUT = 255
"""The exit code of ssh itself; a command that ends with it there is told as 254."""

_CONNECTING = {
    "BatchMode": "yes",
    "StrictHostKeyChecking": "yes",
    "ConnectTimeout": "10",
    "ServerAliveInterval": "10",
    "ServerAliveCountMax": "3",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "ClearAllForwardings": "yes",
    "PermitLocalCommand": "no",
    "RequestTTY": "no",
    "LogLevel": "ERROR",
}
_KEPT = {"ControlMaster": "auto", "ControlPersist": "120"}
_LONGEST_SOCKET = 104 - 40 - 1 - 18
"""Bytes that are left for the folder: macOS takes 104 for a socket's path, %C has 40, and ssh adds 18 for a while."""

# Slurm's commands take their defaults from the environment: SBATCH_PARTITION outdoes the script's own line, and
# SQUEUE_FORMAT changes what is read. https://slurm.schedmd.com/sbatch.html#SECTION_INPUT-ENVIRONMENT-VARIABLES
_CLEAN = (
    "unset $(env | sed -n 's/^\\(\\(SLURM\\|SBATCH\\|SRUN\\|SQUEUE\\|SACCT\\|SACCTMGR\\|SCANCEL\\|SINFO\\|SCONTROL\\)"
    "_[A-Za-z0-9_]*\\)=.*/\\1/p' | grep -vx SLURM_CONF); export LC_ALL=C; "
)
_HERE = _CLEAN + 'exec "$@"'
_THERE = _CLEAN + f'"$@"; code=$?; test $code -ne {_CUT} || code=254; exit $code'

# A line of offset, bytes at most and path each; a line with the number of bytes, or a dash, comes before them.
_READ = (
    'while read -r offset most path; do if test -f "$path" && test -r "$path"; then '
    'fresh=$(($(wc -c < "$path") - offset)); test $fresh -le $most || fresh=$most; test $fresh -ge 0 || fresh=0; '
    'echo $fresh; tail -c "+$((offset + 1))" -- "$path" | head -c $fresh; else echo -; fi; done'
)
_PROFILE = "<train-litgpt>"
# PATH as a login has it: sites put Slurm there in /etc/profile.d, which a command by ssh does not read.
_LOGIN = f'printf \'\\n{_PROFILE}%s\\n{_PROFILE}%s\\n\' "$PATH" "$SLURM_CONF"'


class Answer(NamedTuple):
    """The end of a command: its exit code and what it printed."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Shell:
    """A machine where commands are run as given, past its shell's reading of them, and files are read."""

    host: str | None
    """The login node; None is this machine."""
    ssh: tuple[str, ...] = field(default=(), repr=False)
    """The words before a command that is to run there."""

    @property
    def where(self) -> str:
        """Return the machine's name in messages."""
        return self.host or "this machine"

    def run(self, command: Sequence[str], *, stdin: bytes = b"", seconds: float = 60) -> Answer:
        """Return the answer of a command. A program that is not there is the answer 127 (`NO_COMMAND`).

        Raises:
            PlatformUnreachable: the host cannot be reached, or the command gave no answer in time; it may have run.
            LoginProblem: ssh may not log in there, or does not know the host's key.
        """
        code, out, err = self._bytes(command, stdin, seconds)
        return Answer(code, out.decode(errors="replace"), err)

    def read(self, places: Mapping[str, int], *, most: int = 4 << 20, seconds: float = 60) -> dict[str, bytes]:
        """Return at most so many bytes of each file from an offset on, by one command. Files that are not there lack.

        Raises:
            PlatformUnreachable, LoginProblem: as `run`.
        """
        asked = "".join(f"{offset} {most} {_absolute(path)}\n" for path, offset in places.items())
        code, out, err = self._bytes(("sh", "-c", _READ), asked.encode(), seconds)
        found, rest = {}, out
        for path in places:
            length, end, rest = rest.partition(b"\n")
            if code != 0 or not end or not re.fullmatch(rb"-|[0-9]{1,15}", length):
                raise PlatformUnreachable(f"{path} cannot be read on {self.where}: {words_of(err) or f'code {code}'}")
            if length != b"-":
                found[path], rest = rest[: int(length)], rest[int(length) :]
        return found

    def _bytes(self, command: Sequence[str], stdin: bytes, seconds: float) -> tuple[int, bytes, str]:
        if self.host is None:
            return _ended(("sh", "-c", _HERE, "sh", *command), stdin, seconds, f"{command[0]} gave no answer")
        exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in self._profile.items())
        return self._there(("sh", "-c", exports + _THERE, "sh", *command), stdin, seconds)

    def _there(self, command: Sequence[str], stdin: bytes, seconds: float) -> tuple[int, bytes, str]:
        late = f"{self.host} gave no answer"
        code, out, err = _ended((*self.ssh, shlex.join(command)), stdin, seconds, late)
        if code == _CUT:
            _raise_for(err, self.where)
        return code, out, err

    @cached_property
    def _profile(self) -> dict[str, str]:
        """The variables that a login sets there and Slurm's commands need; profiles may print, and take their time."""
        _, out, _ = self._there(("sh", "-l", "-c", _LOGIN), b"", 60)
        told = [line.removeprefix(_PROFILE) for line in out.decode(errors="replace").splitlines()
                if line.startswith(_PROFILE)]  # fmt: skip
        return {name: value for name, value in zip(("PATH", "SLURM_CONF"), told, strict=False) if value}


def open_shell(host: str | None = None) -> Shell:
    """Return the shell of a login node, or of this machine where none is named. Nothing is asked yet.

    A record, which nodes may write, may name any host: it is asked only if its key is known here, gets no agent and no
    password, and runs nothing but Slurm's commands and what reads an attempt's folder.

    Raises:
        ConfigProblem: the name is none that ssh may be given.
        NotInstalled: there is no ssh here.
    """
    if host is None:
        return Shell(None)
    if not re.fullmatch(HOST, host):
        raise ConfigProblem(
            f"platform.host={host!r} is no name of a host: write host, user@host or a Host of your "
            "~/.ssh/config; other options of ssh belong there too"
        )
    program = shlex.split(os.environ.get(SSH, "ssh"))
    options = _CONNECTING | ({} if _keeps_its_own(program, host) else _kept_open())
    words = (word for name, value in options.items() for word in ("-o", f"{name}={value}"))
    return Shell(host, (*program, *words, "--", host))


def _keeps_its_own(program: Sequence[str], host: str) -> bool:
    """Return whether the user's configuration shares connections to this host already.

    Where a login takes a second factor, that connection is the way in: opened by hand once, and ridden on.
    """
    code, out, err = _ended((*program, "-G", "--", host), b"", 10, "ssh -G gave no answer")
    if code != 0:
        raise ConfigProblem(f"ssh cannot use its configuration for {host}: {words_of(err)}; see ~/.ssh/config")
    chosen = dict(line.split(" ", 1) for line in out.decode(errors="replace").splitlines() if " " in line)
    return chosen.get("controlpath", "none") != "none"


def _kept_open() -> dict[str, str]:
    """Return the options that keep a connection open, in a folder that nobody else can enter; {} where there is none.

    Raises:
        ConfigProblem: the folder is somebody else's.
    """
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp") / f"train-litgpt-ssh-{os.getuid()}"  # noqa: S108
    if len(os.fsencode(folder)) > _LONGEST_SOCKET:
        return {}
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    seen = folder.lstat()
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid() or seen.st_mode & 0o077:
        raise ConfigProblem(
            f"{folder} is not a folder of yours alone, and whoever may enter it could use your logins; look at "
            "who made it, remove it, and run again"
        )
    return {**_KEPT, "ControlPath": f"{folder}/%C"}


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError(f"{path!r} is not absolute, and a login starts in another folder")
    return path


def _ended(argv: Sequence[str], stdin: bytes, seconds: float, late: str) -> tuple[int, bytes, str]:
    """Run a command to its end, apart from this terminal: its Ctrl-C is ours to answer, and no password is asked for.

    Errors go to a file: the process that keeps a connection open holds on to a pipe until it ends itself.
    """
    with tempfile.TemporaryFile() as errors:
        try:
            done = subprocess.run(
                argv, input=stdin, stdout=subprocess.PIPE, stderr=errors, timeout=seconds, check=False,
                start_new_session=True,
            )  # fmt: skip
        except FileNotFoundError as error:
            raise NotInstalled(f"there is no program {argv[0]} here; install OpenSSH's client") from error
        except subprocess.TimeoutExpired as error:
            raise PlatformUnreachable(f"{late} within {seconds:.0f} s; asking again is safe") from error
        errors.seek(0)
        return done.returncode, done.stdout, errors.read().decode(errors="replace")


# OpenSSH's words (sshconnect.c, sshconnect2.c, packet.c, readconf.c, ssh.c) and what to do; the first that fits.
_PROBLEMS: tuple[tuple[str, type[Exception], str], ...] = (
    (
        r"HOST IDENTIFICATION HAS CHANGED", LoginProblem,
        "its key is not the one that you know it by: it was set up anew, or another machine answers in its name; ask "
        "its administrator, and only then remove the old key with `ssh-keygen -R {host}`",
    ),
    (
        r"Host key verification failed|host key is known for", LoginProblem,
        "its key is not known here; run `ssh {host}` once by hand, and compare the fingerprint that it shows with "
        "the one that the site publishes",
    ),
    (
        r"Permission denied \(|Too many authentication failures|No more authentication methods", LoginProblem,
        "it takes none of your keys; see that `ssh {host} true` works without a question. Where a login asks for a "
        "second factor, share connections in ~/.ssh/config (ControlMaster, ControlPath) and log in once by hand",
    ),
    (
        r"Bad configuration option|Bad owner or permissions|Can't open user config file|terminating, \d+ bad",
        ConfigProblem,
        "ssh cannot use its configuration; see ~/.ssh/config",
    ),
    (r"Could not resolve hostname", PlatformUnreachable, "no name server here knows it; see platform.host and the VPN"),
    (r"No route to host|Network is unreachable", PlatformUnreachable, "no way leads there from here; see the VPN"),
    (r"Connection refused", PlatformUnreachable, "no ssh server answers there; it may be starting again"),
    (r"timed out", PlatformUnreachable, "it does not answer; see the VPN, and whether it is down for maintenance"),
)  # fmt: skip


def _raise_for(said: str, host: str) -> NoReturn:
    """Raise the error that ssh's own words mean."""
    words = words_of(" ".join(said.strip().splitlines()[-3:])) or "without a word"
    for pattern, kind, fix in _PROBLEMS:
        if re.search(pattern, said):
            raise kind(f"{host} cannot be reached by ssh: {fix.format(host=host)} ({words})")
    raise PlatformUnreachable(f"the connection to {host} was cut: {words}")
