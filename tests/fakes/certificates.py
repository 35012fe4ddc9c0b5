"""A certificate of this machine's own making, for servers that are reached by https."""

import ssl
import subprocess
from pathlib import Path


def certificate_in(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """The context of a server on this machine, and the PEM file that a client has to trust."""
    key, certificate = folder / "tls.key", folder / "tls.pem"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=this machine",
            "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-addext", "basicConstraints=critical,CA:TRUE",
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    return context, certificate
