"""Signatures of a collected model: its statements as DSSE envelopes, and a `model.sig` of its files.

Only the command that signs reads the private key. No job gets it, and nothing prints it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from launcher.errors import ConfigProblem, NotInstalled, install_extra
from launcher.provenance.metadata import CROISSANT, MODEL_BILL
from launcher.provenance.statements import PROVENANCE, STATEMENT_TYPE, TEST_RESULT
from litgpt_demo.storage import Storage

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner, SSlibKey

KEY_PASSWORD = "TRAIN_LITGPT_KEY_PASSWORD"  # noqa: S105 - the name of a variable
ATTESTATIONS = "attestations.intoto.jsonl"
"""The signed statements, a DSSE envelope on each line (https://github.com/in-toto/attestation, spec/v1/bundle.md)."""
MODEL_SIGNATURE = "model.sig"
"""The signature of the model's files that `model_signing verify` of OpenSSF reads."""
UNLISTED = (PROVENANCE, TEST_RESULT, MODEL_BILL, CROISSANT, ATTESTATIONS, MODEL_SIGNATURE)
"""The files below `final/` that a manifest does not list, because they are written after it or because of it."""

_PAYLOAD_TYPE = "application/vnd.in-toto+json"
_BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_MODEL_PREDICATE = "https://model_signing/signature/v1.0"
_KINDS = ("secp256r1", "secp384r1", "secp521r1", "Ed25519PublicKey")  # model_signing 1.1 accepts these curves too


class BadSignature(Exception):
    """A signature that is damaged, of other content, or by another key."""


def load_signer(path: Path, password: str | None = None) -> CryptoSigner:
    """Return the signer of a private key in PEM. A ConfigProblem if it cannot be read, decrypted or used."""
    serialization = _library()
    from securesystemslib.signer import CryptoSigner

    content, secret, problem = _read(path), None, "it is not one in PEM"
    if b"ENCRYPTED" in content:
        if not password:
            raise ConfigProblem(f"{path} is encrypted with a password", fix=f"set {KEY_PASSWORD} to it")
        secret, problem = password.encode(), f"{KEY_PASSWORD} does not open it, or it is damaged"
    try:
        private_key = serialization.load_pem_private_key(content, secret)
    except (ValueError, TypeError) as error:  # neither has a part of the key or of the password
        raise ConfigProblem(f"{path} cannot be used as a private key: {problem}", fix="give another --key") from error
    _require_kind(path, private_key.public_key())
    return CryptoSigner(private_key)


def load_public_key(path: Path) -> SSlibKey:
    """Return a public key in PEM. A ConfigProblem if it cannot be read or used."""
    serialization = _library()
    from securesystemslib.signer import SSlibKey

    try:
        public_key = serialization.load_pem_public_key(_read(path))
    except ValueError as error:
        what = f"{path} is not a public key in PEM"
        raise ConfigProblem(what, fix="write it by `openssl pkey -in KEY -pubout -out KEY.pub`") from error
    _require_kind(path, public_key)
    return SSlibKey.from_crypto(public_key)


def _library() -> Any:
    try:
        import securesystemslib.dsse  # noqa: F401
        from cryptography.hazmat.primitives import serialization
    except ImportError as error:
        what = f"signatures need securesystemslib and cryptography, which are not installed ({error})"
        raise NotInstalled(what, fix=install_extra("sign")) from error
    return serialization


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigProblem(f"the key {path} cannot be read ({error.strerror})", fix="give another file") from error


def _require_kind(path: Path, public_key: Any) -> None:
    kind = getattr(getattr(public_key, "curve", public_key), "name", type(public_key).__name__)
    if kind not in _KINDS:
        fix = "give an EC key of P-256, P-384 or P-521, or an Ed25519 key"
        raise ConfigProblem(f"{path} is a key of {kind}", fix=fix)


def sign(final: Storage, name: str, digests: Mapping[str, str], signer: CryptoSigner) -> list[str]:
    """Sign both statements and the model's files, and return the names of the written files.

    Args:
        final: the folder of the collected model.
        name: of the model.
        digests: path to SHA-256 of its files, which were read for it.
    """
    lines = [json.dumps(_signed(final.read(statement), signer)) + "\n" for statement in (PROVENANCE, TEST_RESULT)]
    contents = {ATTESTATIONS: "".join(lines)}
    final.remove(MODEL_SIGNATURE)  # by an earlier key
    if signer.public_key.keytype == "ecdsa":  # model_signing takes no other
        contents[MODEL_SIGNATURE] = json.dumps(_model_signature(name, digests, signer))
    for path, content in contents.items():
        final.write(path, content.encode())
    return list(contents)


def _signed(payload: bytes, signer: CryptoSigner) -> dict[str, Any]:
    from securesystemslib.dsse import Envelope

    envelope = Envelope(payload, _PAYLOAD_TYPE, {})
    envelope.sign(signer)
    return envelope.to_dict()


def _model_signature(name: str, digests: Mapping[str, str], signer: CryptoSigner) -> dict[str, Any]:
    """Return a Sigstore bundle with a public key, as model_signing 1.1 writes it (_signing/sign_ec_key.py)."""
    paths = sorted(digests, key=PurePosixPath)
    resources = [{"name": path, "algorithm": "sha256", "digest": digests[path]} for path in paths]
    serialization = {
        "method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": sorted(UNLISTED),
    }  # fmt: skip
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": _root_digest(resources)}}],
        "predicateType": _MODEL_PREDICATE,
        "predicate": {"serialization": serialization, "resources": resources},
    }
    return {
        "mediaType": _BUNDLE_TYPE,
        "verificationMaterial": {"publicKey": {"hint": _hint(signer.public_key)}, "tlogEntries": []},
        "dsseEnvelope": _signed(json.dumps(statement).encode(), signer),
    }


def _root_digest(resources: Sequence[Mapping[str, str]]) -> str:
    return sha256(b"".join(bytes.fromhex(resource["digest"]) for resource in resources)).hexdigest()


def _hint(key: SSlibKey) -> str:
    return sha256(key.keyval["public"].encode()).hexdigest()


def verified_statements(content: bytes, key: SSlibKey) -> tuple[list[bytes], str]:
    """Return the statements that this key signed, and why a line is not one of them. Others may have added lines."""
    statements, reason = list[bytes](), "it has no line"
    for line in content.splitlines():
        try:
            statements.append(_verified(line, key))
        except BadSignature as error:
            reason = str(error)
    return statements, reason


def verified_digests(content: bytes, key: SSlibKey) -> dict[str, str]:
    """Return path to SHA-256 of the files that a model.sig is of; BadSignature if this key did not sign it."""
    try:
        bundle = json.loads(content)
        statement = json.loads(_verified(json.dumps(bundle["dsseEnvelope"]).encode(), key))
        resources = statement["predicate"]["resources"]
        digests = {resource["name"]: resource["digest"] for resource in resources}
        is_whole = statement["subject"][0]["digest"]["sha256"] == _root_digest(resources)
        hint, kind = bundle["verificationMaterial"]["publicKey"]["hint"], bundle["mediaType"]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise BadSignature("it is not a signature of model_signing") from error
    if not is_whole or kind != _BUNDLE_TYPE or hint != _hint(key):
        raise BadSignature("model_signing would not accept its type, its key or its subject")
    return digests


def _verified(line: bytes, key: SSlibKey) -> bytes:
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import VerificationError

    try:
        envelope = Envelope.from_dict(json.loads(line))
        is_canonical = envelope.to_dict() == json.loads(line)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadSignature("a line of it is not a DSSE envelope") from error
    if envelope.payload_type != _PAYLOAD_TYPE or not is_canonical:
        raise BadSignature("an envelope of it does not hold an in-toto statement")
    if key.keyid not in envelope.signatures:
        raise BadSignature("another key signed it")
    try:
        envelope.verify([key], 1)
    except VerificationError as error:
        raise BadSignature("its content is not what the key signed") from error
    return envelope.payload
