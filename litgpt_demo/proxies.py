"""The proxies in the environment, checked before the first HTTP client reads them."""

from __future__ import annotations

from collections.abc import MutableMapping
from importlib.util import find_spec
from urllib.parse import urlsplit

from litgpt_demo.errors import UserError

# In the form that httpx, requests, urllib, websockets and gRPC all understand. None of them exempts these hosts.
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_SCHEMES = ("http", "https", "socks5", "socks5h")  # httpx supports no others
# A SOCKS proxy needs socksio in httpx (Prefect, the Hub) and PySocks, imported as socks, in requests (buckets).
_SOCKS_MODULES = ("socksio", "socks")


def settle_proxies(environ: MutableMapping[str, str]) -> None:
    """Exempt this machine from the proxies in `environ`: a Prefect server or an emulator here is behind none.

    Each of our processes calls this first, and the processes that it starts inherit the exemption. A UserError if a
    proxy's address is one that HTTP clients refuse, even for requests to other hosts.
    """
    kinds = ("http_proxy", "https_proxy", "all_proxy")
    named = [name for kind in kinds for name in (kind, kind.upper()) if environ.get(name, "").strip()]
    if not named:
        return
    for name in named:
        address = environ[name].strip()
        try:
            proxy = urlsplit(address if "://" in address else f"http://{address}")
            beyond = proxy.path.strip("/") or proxy.query or proxy.fragment
            usable = proxy.scheme in _SCHEMES and proxy.hostname and proxy.port != 0 and not beyond
        except ValueError:
            usable = False
        if not usable:  # it is not shown: it may hold a password
            what = f"{name} is not a proxy's address, such as http://user:password@host:port or socks5://host:port"
            fix = f"write /, #, ?, @ and : of a password as %2F, %23, %3F, %40 and %3A, or unset {name}"
            raise UserError(what, fix=fix)
        missing = [module for module in _SOCKS_MODULES if find_spec(module) is None]
        if proxy.scheme.startswith("socks") and missing:
            what = f"{name} names a SOCKS proxy, but the packages for one are not installed ({', '.join(missing)})"
            raise UserError(what, fix=f"run `pip install socksio PySocks`, or unset {name}")
    # Lower case wins in all clients, and an empty value counts as unset.
    exempt = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    hosts = [host.strip() for host in exempt.split(",") if host.strip()]
    if "*" not in hosts:  # it means every host; urllib reads it only if nothing else is listed
        hosts += [host for host in _LOOPBACK if host not in hosts]
    environ["no_proxy"] = environ["NO_PROXY"] = ",".join(hosts)
