"""What the API says no with: a Status object, as the real one words it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REASONS = {
    400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 405: "MethodNotAllowed",
    409: "Conflict", 410: "Expired", 413: "RequestEntityTooLarge", 415: "UnsupportedMediaType", 422: "Invalid",
    429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable", 504: "Timeout",
}  # fmt: skip


class ApiError(Exception):
    """An answer that is not the one wished for."""

    def __init__(
        self, status: int, message: str, *, reason: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, dict(headers or {})
        self.reason = reason or REASONS[status]

    def body(self) -> dict[str, Any]:
        return {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, "code": self.status,
        }  # fmt: skip


def not_found(resource: str, name: str) -> ApiError:
    return ApiError(404, f'{resource} "{name}" not found')


def invalid(kind: str, name: str, troubles: list[str]) -> ApiError:
    """All that is wrong with one object, at once."""
    listed = troubles[0] if len(troubles) == 1 else f"[{', '.join(troubles)}]"
    return ApiError(422, f'{kind} "{name}" is invalid: {listed}')
