"""The rule for where a secret may go, and texts of others that repeat one."""

import re

import pytest

from litgpt_demo.errors import words_of
from litgpt_demo.secrets import Grant, is_loopback, is_protected, origin_of, redacted


@pytest.mark.parametrize("host", ["127.evil.example", "localhost.evil.example", "0.0.0.0", "127.1", "2130706433"])
def test_a_name_that_only_begins_as_this_machines_is_another_machine(host: str) -> None:
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
        f"signed {'eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJtZSJ9.s3cr-t'}",
    ],
)
def test_what_has_the_form_of_a_secret_is_left_out(text: str) -> None:
    for told in (redacted(text), words_of(text)):
        assert "[secure]" in told
        assert not re.search("s3cr|czNj", told)


def test_other_texts_stay_as_they_are() -> None:
    for text in (
        'the Bearer token is missing; User "me" cannot get resource "secrets"',
        "train.wandb.secret=WANDB_API_KEY names a variable that is not in this node's environment",
        "https://huggingface.co/datasets/owner/name?download=true and gs://bucket/a:b@c",
        "registry.example:5000/team/train@sha256:0000",
    ):
        assert redacted(text) == text


def test_a_known_secret_is_left_out_however_it_is_written() -> None:
    told = redacted('raw s3cr"t/marker, quoted s3cr%22t%2Fmarker, json s3cr\\"t/marker', 's3cr"t/marker', "")
    assert told == "raw [secure], quoted [secure], json [secure]"


def test_a_grant_does_not_show_its_token_and_an_answer_without_one_is_none() -> None:
    grant = Grant.read(b'{"accessToken": "s3cret", "expiresIn": 60}')
    assert (grant.token.get_secret_value(), grant.expires) == ("s3cret", 60)
    assert "s3cret" not in repr(grant)
    for content in (b"", b"[]", b'{"token": 5}', b'{"token": "two words"}', b'{"token": ""}'):
        assert Grant.read(content) is None
