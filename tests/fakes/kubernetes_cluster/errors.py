"""What the API says no with: a Status object, as the real one words it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

REASONS = {
    400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 405: "MethodNotAllowed",
    409: "Conflict", 410: "Expired", 413: "RequestEntityTooLarge", 415: "UnsupportedMediaType", 422: "Invalid",
    429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable", 504: "Timeout",
}  # fmt: skip
CAUSES = {
    "Required value": "FieldValueRequired", "Duplicate value": "FieldValueDuplicate", "Not found": "FieldValueNotFound",
    "Unsupported value": "FieldValueNotSupported", "Forbidden": "FieldValueForbidden", "Too long": "FieldValueTooLong",
    "Invalid value": "FieldValueInvalid", "Internal error": "InternalError",
}  # fmt: skip
_FIELD = re.compile(r"(?P<field>[A-Za-z<][\w.\[\]<>-]*): (?P<message>.+)", re.DOTALL)


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


def about(resource: str, name: str | None = None, **more: Any) -> dict[str, Any]:
    """The `details` of a Status: which object of which kind (`jobs.batch`) it is about."""
    kind, _, group = resource.partition(".")
    named = {"name": name} if name else {}
    return {**named, **({"group": group} if group else {}), "kind": kind, **more}


def not_found(resource: str, name: str) -> ApiError:
    return ApiError(404, f'{resource} "{name}" not found', details=about(resource, name))


def already_exists(resource: str, name: str) -> ApiError:
    text = f'{resource} "{name}" already exists'
    return ApiError(409, text, reason="AlreadyExists", details=about(resource, name))


def forbidden(resource: str, name: str, why: str) -> ApiError:
    """An admission plug-in refuses the object."""
    return ApiError(403, f'{resource} "{name}" is forbidden: {why}', details=about(resource, name))


def invalid(kind: str, name: str, troubles: Sequence[str], *, webhook: str | None = None) -> ApiError:
    """All that is wrong with one object, at once. The kind has its group: `Job.batch`."""
    listed = troubles[0] if len(troubles) == 1 else f"[{', '.join(troubles)}]"
    text = f'{kind} "{name}" is invalid: {listed}'
    if webhook is not None:
        text = f'admission webhook "{webhook}" denied the request: {text}'
    return ApiError(422, text, details=about(kind, name, causes=[_cause(one) for one in troubles]))


def _cause(trouble: str) -> dict[str, str]:
    match = _FIELD.fullmatch(trouble)
    field, message = (match["field"], match["message"]) if match else ("", trouble)
    reason = next((code for text, code in CAUSES.items() if message.startswith(text)), "FieldValueTypeInvalid")
    return {"reason": reason, "message": message, **({"field": field} if field else {})}
