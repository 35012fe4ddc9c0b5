"""Commands and files of the machine that speaks to Slurm, here and through a real sshd."""

from __future__ import annotations

import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Timer

import pytest
from services.login_node import LoginNode, login_node

from launcher.errors import ConfigProblem, LoginProblem, NotInstalled, PlatformUnreachable
from launcher.platforms.slurm.shell import NO_COMMAND, SSH, Answer, open_shell
from launcher.runs.attempts import recorded_platform

AWKWARD = "two words; $HOME `id` 'quoted' \"twice\" \\ * ü"


def test_a_command_gets_its_words_as_they_are() -> None:
    assert open_shell().run(["printf", "%s", AWKWARD]).out == AWKWARD


def test_a_command_reads_what_it_is_given_and_ends_as_it_ends() -> None:
    assert open_shell().run(["sh", "-c", "cat; echo told >&2; exit 7"], stdin=b"given") == Answer(7, "given", "told\n")


def test_a_program_that_is_not_there_is_told_by_its_exit_code() -> None:
    assert open_shell().run(["no-such-program"]).code == NO_COMMAND


def test_nobodys_defaults_change_what_slurm_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SBATCH_PARTITION", "SQUEUE_FORMAT", "SLURM_JOB_ID", "SLURM_CONF", "LC_ALL"):
        monkeypatch.setenv(name, "mine")
    said = open_shell().run(["env"]).out.splitlines()
    assert [line for line in said if line.startswith(("SBATCH", "SQUEUE", "SLURM"))] == ["SLURM_CONF=mine"]
    assert "LC_ALL=C" in said


def test_a_command_that_does_not_end_is_no_answer() -> None:
    with pytest.raises(PlatformUnreachable, match=r"sleep gave no answer within 1 s"):
        open_shell().run(["sleep", "20"], seconds=1)


def test_a_file_is_read_on_from_where_the_last_look_ended(tmp_path: Path) -> None:
    log = tmp_path / "a log"
    log.write_bytes(b"0123456789")
    shell, path = open_shell(), str(log)
    assert shell.read({path: 0}, most=4) == {path: b"0123"}
    assert shell.read({path: 4}) == {path: b"456789"}
    assert shell.read({path: 10}) == shell.read({path: 11}) == {path: b""}


def test_many_files_are_read_by_one_command_and_those_that_are_not_there_lack(tmp_path: Path) -> None:
    names = [str(tmp_path / name) for name in ("one", "none", "two", "empty")]
    for name, content in zip(names[::2], (b"1\n-\n", b"2"), strict=True):
        Path(name).write_bytes(content)
    Path(names[3]).touch()
    assert open_shell().read(dict.fromkeys(names, 0)) == {names[0]: b"1\n-\n", names[2]: b"2", names[3]: b""}


@pytest.mark.parametrize("host", ["-oProxyCommand=touch hacked", "user@-oProxyCommand=x", "a b", "", "login;id"])
def test_what_ssh_could_take_for_an_option_is_no_host(host: str) -> None:
    with pytest.raises(ConfigProblem, match=r"is no name of a host: write host, user@host"):
        open_shell(host)
    section = {"kind": "slurm", "host": host, "environment": {"kind": "venv", "path": "/venv"}}
    with pytest.raises(ConfigProblem, match="platform"):  # of a record, which nodes may write
        recorded_platform(section)


def test_a_machine_without_ssh_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SSH, "no-such-ssh")
    with pytest.raises(NotInstalled, match="there is no program no-such-ssh here"):
        open_shell("login")


# --- through ssh ------------------------------------------------------------------------------------------------------


@pytest.mark.services
class TestLoginNode:
    def test_commands_and_files_are_those_of_the_host(self, login: LoginNode, tmp_path: Path) -> None:
        shell = open_shell("login")
        assert shell.run(
            ["sh", "-c", 'cat; printf "%s %s" "$PLACE" "$1"; exit 3', "sh", AWKWARD], stdin=b"in "
        ) == Answer(3, f"in there {AWKWARD}", "")
        file = str(tmp_path / "file")
        Path(file).write_bytes(b"0123456789")
        assert shell.read({file: 3, str(tmp_path / "none"): 0}, most=4) == {file: b"3456"}
        assert shell.run(["no-such-program"]).code == NO_COMMAND

    def test_a_command_that_ends_with_255_is_not_taken_for_a_cut_connection(self, login: LoginNode) -> None:
        assert open_shell("login").run(["sh", "-c", "exit 255"]).code == 254

    def test_nobodys_defaults_on_the_host_change_what_slurm_is_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with login_node({"SBATCH_PARTITION": "mine", "SLURM_CONF": "/there"}) as node:
            monkeypatch.setenv(SSH, f"ssh -F {node.config}")
            monkeypatch.setenv("XDG_RUNTIME_DIR", str(node.folder))
            said = open_shell("login").run(["env"]).out.splitlines()
        assert [line for line in said if line.startswith(("SBATCH", "SLURM"))] == ["SLURM_CONF=/there"]

    def test_the_second_look_needs_no_new_connection(self, login: LoginNode) -> None:
        shell = open_shell("login")
        shell.run(["true"])
        again = open_shell("login")
        for _ in range(3):
            again.run(["true"])
        assert (login.folder / "sshd.log").read_text().count("Accepted publickey") == 1
        socket = next((login.folder / f"train-litgpt-ssh-{os.getuid()}").iterdir())
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700

    def test_more_commands_at_once_than_a_connection_carries_are_all_answered(self, login: LoginNode) -> None:
        """One carries 10: https://man.openbsd.org/sshd_config#MaxSessions."""
        shell = open_shell("login")
        shell.run(["true"])
        with ThreadPoolExecutor(14) as threads:
            answers = list(threads.map(lambda number: shell.run(["sh", "-c", f"sleep 2; echo {number}"]), range(14)))
        assert [answer.out for answer in answers] == [f"{number}\n" for number in range(14)]

    def test_a_folder_that_others_may_enter_keeps_no_connection(self, login: LoginNode) -> None:
        (login.folder / f"train-litgpt-ssh-{os.getuid()}").mkdir(mode=0o755)
        with pytest.raises(ConfigProblem, match="is not a folder of yours alone"):
            open_shell("login")

    def test_the_users_own_shared_connection_is_ridden_on(self, login: LoginNode) -> None:
        """It is the way in where a login takes a second factor, which nobody can give here."""
        login.configure(ControlPath=str(login.folder / "own"), ControlMaster="auto", ControlPersist="60")
        open_shell("login").run(["true"])
        login.configure(ControlPath=str(login.folder / "own"), IdentityFile="/no/such/key")
        assert open_shell("login").run(["printf", "in"]).out == "in"

    def test_what_the_hosts_profile_prints_is_no_part_of_an_answer(
        self, login: LoginNode, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        profile = Path("/etc/profile.d/train-litgpt-test.sh")
        if os.geteuid() != 0 or not profile.parent.is_dir():
            pytest.skip("only root can write /etc/profile.d")
        profile.write_text("echo 'Welcome to the cluster'\nexport PATH=$PATH:/opt/of-the-site/bin\n")
        try:
            path = open_shell("login").run(["sh", "-c", "printf '%s' \"$PATH\""]).out
        finally:
            profile.unlink()
        assert path.endswith(":/opt/of-the-site/bin")
        assert "Welcome" not in path

    def test_a_key_that_is_not_taken_is_said(self, login: LoginNode) -> None:
        login.configure(IdentityFile=str(login.folder / "host_key"))
        with pytest.raises(
            LoginProblem, match=r"login cannot be reached by ssh: it takes none of your keys; .*second factor"
        ):
            open_shell("login").run(["true"])

    def test_a_host_that_is_not_known_is_not_believed(self, login: LoginNode) -> None:
        login.configure(UserKnownHostsFile="/dev/null", StrictHostKeyChecking="accept-new")
        with pytest.raises(LoginProblem, match=r"its key is not known here; run `ssh login` once by hand"):
            open_shell("login").run(["true"])

    def test_a_host_whose_key_has_changed_is_not_believed(self, login: LoginNode) -> None:
        other = " ".join((login.folder / "key.pub").read_text().split()[:2])
        (login.folder / "known_hosts").write_text(f"[127.0.0.1]:{login.port} {other}\n")
        with pytest.raises(LoginProblem, match=r"its key is not the one that you know it by: .*ssh-keygen -R login"):
            open_shell("login").run(["true"])

    def test_a_name_that_no_server_knows_is_said(self, login: LoginNode) -> None:
        login.configure(HostName="no-such-host.invalid")
        with pytest.raises(PlatformUnreachable, match=r"no name server here knows it; see platform\.host and the VPN"):
            open_shell("login").run(["true"])

    def test_a_setting_that_ssh_does_not_know_is_said(self, login: LoginNode) -> None:
        login.configure(NoSuchOption="yes")
        with pytest.raises(ConfigProblem, match=r"ssh cannot use its configuration for login: .*nosuchoption"):
            open_shell("login")

    def test_a_host_that_is_away_is_unreachable_until_it_is_back(self, login: LoginNode, tmp_path: Path) -> None:
        """A log is read on, without a gap and nothing twice."""
        log = tmp_path / "log"
        log.write_bytes(b"before ")
        shell = open_shell("login")
        read = shell.read({str(log): 0})[str(log)]
        login.stop()
        with pytest.raises(PlatformUnreachable, match="no ssh server answers there; it may be starting again"):
            shell.read({str(log): len(read)})
        log.write_bytes(b"before after")
        login.start()
        assert read + shell.read({str(log): len(read)})[str(log)] == b"before after"

    def test_a_connection_that_is_cut_in_the_middle_is_no_answer(self, login: LoginNode) -> None:
        shell = open_shell("login")
        shell.run(["true"])
        Timer(1, login.stop).start()
        began = time.monotonic()
        with pytest.raises(PlatformUnreachable):
            shell.run(["sleep", "30"])
        assert time.monotonic() - began < 20
