"""What the API says no with: a Status object, as the real one words it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

REASONS = {
    400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 405: "MethodNotAllowed",
    409: "Conflict", 410: "Expired", 422: "Invalid", 429: "TooManyRequests", 500: "InternalError",
    503: "ServiceUnavailable",
}  # fmt: skip


class ApiError(Exception):
    """An answer that is not the one wished for."""

    def __init__(
        self, status: int, message: str, *, reason: str | None = None, details: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.headers = status, message, dict(headers or {})
        self.reason = reason or REASONS[status]
        self.details = dict(details or {})

    def body(self) -> dict[str, Any]:
        return {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, **({"details": self.details} if self.details else {}),
            "code": self.status,
        }  # fmt: skip


def about(resource: str, name: str | None = None) -> dict[str, Any]:
    """The `details` of a Status: which object of which kind (`jobs.batch`) it is about."""
    kind, _, group = resource.partition(".")
    named = {"name": name} if name else {}
    return {**named, **({"group": group} if group else {}), "kind": kind}


def not_found(resource: str, name: str) -> ApiError:
    return ApiError(404, f'{resource} "{name}" not found', details=about(resource, name))


def already_exists(resource: str, name: str) -> ApiError:
    text = f'{resource} "{name}" already exists'
    return ApiError(409, text, reason="AlreadyExists", details=about(resource, name))


def forbidden(resource: str, name: str, why: str) -> ApiError:
    """An admission plug-in refuses the object."""
    return ApiError(403, f'{resource} "{name}" is forbidden: {why}', details=about(resource, name))


def invalid(kind: str, name: str, troubles: Sequence[str]) -> ApiError:
    """All that is wrong with one object, at once. The kind has its group: `Job.batch`."""
    listed = troubles[0] if len(troubles) == 1 else f"[{', '.join(troubles)}]"
    return ApiError(422, f'{kind} "{name}" is invalid: {listed}', details=about(kind, name))
