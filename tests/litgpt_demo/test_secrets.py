"""The rule for where a secret may go, and texts of others that repeat one."""

from __future__ import annotations

import base64

import pytest

from litgpt_demo.errors import words_of
from litgpt_demo.secrets import Grant, is_loopback, is_protected, origin_of, redacted

SECRET = 's3cr"t/marker'


@pytest.mark.parametrize(
    "host",
    ["127.evil.example", "localhost.evil.example", "my-localhost", "0.0.0.0", "127.1", "2130706433"],
)  # fmt: skip
def test_a_name_that_only_begins_as_this_machines_is_another_machine(host: str) -> None:
    assert not is_loopback(host)
    assert all(map(is_loopback, ("LocalHost", "127.8.9.1", "[::1]")))
    assert origin_of(f"https://me:s3cret@{host}:8443/a?token=b") == f"https://{host}:8443"


@pytest.mark.parametrize(
    ("url", "protected"),
    [
        ("https://example.com/a", True), ("http://localhost:8080/a", True), ("http://[::1]:8080", True),
        ("http://example.com", False), ("http://127.evil.example", False), ("http://localhost@evil.example", False),
        ("http://evil.example#@localhost", False), ("ftp://evil.example", False), ("evil.example", False),
        ("http://[::1", False),
    ],
)  # fmt: skip
def test_a_secret_goes_by_https_or_stays_on_this_machine(url: str, protected: bool) -> None:
    assert is_protected(url) is protected


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {'s3cr-t/marker'}",
        f"authorization: Basic {base64.b64encode(b'me:secret').decode()} is wrong",
        '{"clientSecret": "s3cr-t/marker"}',
        '{\\"client_secret\\": \\"s3cr-t/marker\\"}',
        "'refresh_token': 's3cr-t/marker'",
        "see https://elsewhere.example/login?next=a&access_token=s3cr-t/marker#top",
        "http://me:s3cr-t-marker@proxy.example:3128 cannot be reached",
        f"signed {'eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJtZSJ9.s3cr-t'}",
    ],
)
def test_what_has_the_form_of_a_secret_is_left_out(text: str) -> None:
    for told in (redacted(text), words_of(text)):
        assert "[secure]" in told
        assert "s3cr" not in told
        assert base64.b64encode(b"me:secret").decode() not in told


@pytest.mark.parametrize(
    "text",
    [
        "the Bearer token is missing; Basic authentication is off",
        'secrets "hub-token" is forbidden: User "me" cannot get resource "secrets"',
        "train.wandb.secret=WANDB_API_KEY names a variable that is not in this node's environment",
        "https://huggingface.co/datasets/owner/name?download=true and gs://bucket/a:b@c",
        "registry.example:5000/team/train@sha256:0000",
    ],
)
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert redacted(text) == text


def test_a_known_secret_is_left_out_however_it_is_written() -> None:
    told = redacted('raw s3cr"t/marker, quoted s3cr%22t%2Fmarker, json s3cr\\"t/marker', SECRET, "")
    assert told == "raw [secure], quoted [secure], json [secure]"


@pytest.mark.parametrize("content", [b"", b"[]", b'{"token": 5}', b'{"token": "two words"}', b'{"token": ""}'])
def test_an_answer_without_a_token_is_no_grant(content: bytes) -> None:
    assert Grant.read(content) is None


def test_a_grant_does_not_show_its_token() -> None:
    grant = Grant.read(b'{"accessToken": "s3cret", "expiresIn": 60}')
    assert grant is not None
    assert (grant.token.get_secret_value(), grant.expires) == ("s3cret", 60)
    assert "s3cret" not in repr(grant)
