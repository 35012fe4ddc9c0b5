"""The rule for where a secret may go, and texts of others that repeat one."""

import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litgpt_demo import secrets as module
from litgpt_demo.errors import one_line
from litgpt_demo.grants import Grant
from litgpt_demo.node import logs
from litgpt_demo.secrets import Mask, is_loopback, is_protected, origin_of, redacted, secrets_of


@pytest.mark.parametrize("host", ["127.evil.example", "localhost.evil.example", "0.0.0.0", "127.1", "2130706433"])
def test_name_that_begins_like_localhost_is_another_machine(host: str) -> None:
    assert not is_loopback(host)
    assert all(map(is_loopback, ("LocalHost", "127.8.9.1", "[::1]")))
    assert origin_of(f"https://me:s3cret@{host}:8443/a?token=b") == f"https://{host}:8443"


def test_a_secret_goes_by_https_or_stays_on_this_machine() -> None:
    for url in ("https://example.com/a", "http://localhost:8080/a", "http://[::1]:8080"):
        assert is_protected(url)
    for url in ("http://example.com", "http://127.evil.example", "http://localhost@evil.example", "http://[::1",
                "http://evil.example#@localhost", "ftp://evil.example", "evil.example"):  # fmt: skip
        assert not is_protected(url)


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer s3cr-t/marker",
        "authorization: Basic czNjcjptYXJrZXI= is wrong",
        '{"clientSecret": "s3cr-t/marker"}',
        '{\\"client_secret\\": \\"s3cr-t/marker\\"}',
        "'refresh_token': 's3cr-t/marker'",
        "see https://elsewhere.example/login?next=a&access_token=s3cr-t/marker#top",
        "http://me:s3cr-t-marker@proxy.example:3128 cannot be reached",
        "AWS_SECRET_ACCESS_KEY=s3cr/czNjmarker is set",
        "no access for AKIAS3CRCZNJ23456789",
        "https://hooks.slack.com/services/T0/B0/s3crczNj",
        "xoxb-1234567890-s3crczNj",
        f"wandb: api-key {'0123456789' * 4} is wrong",
        f"wandb_v1_s3cr{'czNj' * 8}",
        f"ghp_s3cr{'czNj' * 8}",
        f"ya29.s3cr{'czNj' * 8}",
        f"signed {'eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJtZSJ9.s3cr-t'}",
    ],
)
def test_text_in_the_form_of_a_secret_is_removed(text: str) -> None:
    for cleaned in (redacted(text), one_line(text), Mask([])(text.encode()).decode().replace("*****", "[secure]")):
        assert "[secure]" in cleaned
        assert not re.search("s3cr|czNj", cleaned)


@pytest.mark.parametrize("part", ["SECRET_", "secret", "a.", "-eyJ"])
def test_redaction_takes_time_in_proportion(part: str) -> None:
    """A line of a node may have 4 MiB; with the square of the length this one would take minutes."""
    line = f'"{part * (300_000 // len(part))}'
    assert redacted(f"{line} https://me:word@host/") == f"{line} https://me:[secure]@host/"


def test_other_texts_stay_as_they_are() -> None:
    for text in (
        'the Bearer token is missing; User "me" cannot get resource "secrets"',
        "train.wandb.secret=WANDB_API_KEY names a variable that is not in this node's environment",
        "https://huggingface.co/datasets/owner/name?download=true and gs://bucket/a:b@c",
        "registry.example:5000/team/train@sha256:0000",
        f"commit {'0123456789' * 4}, MAX_TOKENS=50, TOKENIZERS_PARALLELISM=false, export HF_TOKEN=$(cat file)",
    ):
        assert redacted(text) == text


def test_a_known_secret_is_left_out_however_it_is_written() -> None:
    text = redacted('raw s3cr"t/marker, quoted s3cr%22t%2Fmarker, json s3cr\\"t/marker', 's3cr"t/marker', "")
    assert text == "raw [secure], quoted [secure], json [secure]"


@given(st.integers(0, 300), st.sampled_from(["", "\n"]), st.sampled_from([" ", "\n"]))
def test_a_mask_hides_a_secret_at_every_border(before: int, after: str, filler: str) -> None:
    """Parts of a file are read one by one, here of 64 bytes; what is copied keeps its length."""
    secret, url = "s3cret-of-the-hub", "https://me:s3cret-of-the-hub@elsewhere.example/a"
    content = (filler * before + secret + " " + url + after).encode()
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.setattr(module, "_BLOCK", 64)
        patch.setattr(Mask, "overlap", 56)
        source, target = Path(folder, "source"), Path(folder, "target")
        source.write_bytes(content)
        assert Mask([secret]).copy(source, target, cut=False)
        masked = target.read_bytes()
        assert (b"s3cret" in masked, len(masked)) == (False, len(content))
        source.write_bytes(content[: len(content) - len(after) - 20])
        assert not Mask([secret]).copy(source, target, cut=True)
        assert masked.startswith(target.read_bytes()), "positions in the log stay what they were"


@given(st.integers(0, 200), st.integers(1, 90))
def test_a_mask_covers_a_token_that_comes_in_two_parts(before: int, size: int) -> None:
    """Its form alone tells what it is; a mask over its first part must not leave the second one without a form."""
    token = b"hf_" + b"sEcr3tOfTheHub" * 3
    content = b" " * before + token + b" and on"
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.setattr(module, "_BLOCK", 64)
        patch.setattr(logs, "_LONGEST", 64)
        patch.setattr(Mask, "overlap", 56)
        source, target, log = Path(folder, "source"), Path(folder, "target"), Path(folder, "log")
        source.write_bytes(content)
        assert Mask([]).copy(source, target, cut=False)
        with logs.BestEffortLog(log, "ab", mask=Mask([])) as file:
            for start in range(0, len(content), size):
                file.write(content[start : start + size])
        expected = b" " * before + b"*" * len(token) + b" and on"
        assert (target.read_bytes(), log.read_bytes().replace(b"\n", b"")) == (expected, expected)


def test_a_log_that_was_cut_off_ends_with_no_part_of_a_secret(tmp_path: Path) -> None:
    (tmp_path / "cut.log").write_bytes(b"downloading\nwith s3cret-of-")
    assert Mask(["s3cret-of-the-hub"]).copy(tmp_path / "cut.log", tmp_path / "masked", cut=False)
    assert (tmp_path / "masked").read_bytes() == b"downloading\nwith **********"


def test_secrets_of_an_environment_follow_from_its_names() -> None:
    environ = {
        "HF_TOKEN": "hf_abcdefgh", "WANDB_API_KEY": "0123456789ab", "https_proxy": "http://me:p%40ssword@proxy:3128",
        "GOOGLE_APPLICATION_CREDENTIALS": "/var/run/key.json", "TOKENIZERS_PARALLELISM": "false", "USER": "somebody",
    }  # fmt: skip
    assert secrets_of(environ) == {"hf_abcdefgh", "0123456789ab", "p%40ssword", "p@ssword"}


def test_grant_hides_its_token() -> None:
    """An answer without one is no grant."""
    grant = Grant.read(b'{"accessToken": "s3cret", "expiresIn": 60}')
    assert (grant.token.get_secret_value(), grant.expires) == ("s3cret", 60)
    assert "s3cret" not in repr(grant)
    for content in (b"", b"[]", b'{"token": 5}', b'{"token": "two words"}', b'{"token": ""}'):
        assert Grant.read(content) is None
