"""Who is asking, and may they? One user, whose token may expire and whose rules a test declares."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import ApiError, about
from .store import Kind

Rule = Mapping[str, Sequence[str]]
"""As in a Role: apiGroups, resources and verbs."""

USER = "tester"


class Access:
    """Without rules the user may do everything."""

    def __init__(self) -> None:
        self.token = secrets.token_urlsafe(12)
        self.rules: Sequence[Rule] | None = None

    def expire(self) -> None:
        """From now on another token is asked for; streams that are open stay so, as on a real server."""
        self.token = secrets.token_urlsafe(12)

    def authenticate(self, headers: Mapping[str, str]) -> None:
        """Raises:
        ApiError: No token, or not the current one.
        """
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or token != self.token:
            raise ApiError(401, "Unauthorized")

    def authorize(self, verb: str, kind: Kind, subresource: str, namespace: str | None, name: str | None) -> None:
        """Raises:
        ApiError: No rule allows it.
        """
        if kind.plural == "selfsubjectaccessreviews" or self.allows(verb, kind.group, kind.plural, subresource):
            return
        what = f"{kind.plural}/{subresource}" if subresource else kind.plural
        where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
        named = f' "{name}"' if name else ""
        raise ApiError(
            403,
            f'{kind.qualified}{named} is forbidden: User "{USER}" cannot {verb} resource "{what}" '
            f'in API group "{kind.group}" {where}',
            details=about(kind.qualified, name),
        )

    def allows(self, verb: str, group: str, plural: str, subresource: str = "") -> bool:
        if self.rules is None:
            return True
        what = f"{plural}/{subresource}" if subresource else plural
        return any(
            _in(group, rule.get("apiGroups", ()))
            and _in(what, rule.get("resources", ()))
            and _in(verb, rule.get("verbs", ()))
            for rule in self.rules
        )

    def review(self, review: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a SelfSubjectAccessReview."""
        asked = review["spec"].get("resourceAttributes") or {}
        allowed = self.allows(asked["verb"], asked["group"], asked["resource"], asked.get("subresource", ""))
        return {**review, "status": {"allowed": allowed}}


def _in(wanted: str, listed: Sequence[str]) -> bool:
    return "*" in listed or wanted in listed
