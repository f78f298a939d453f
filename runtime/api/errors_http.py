"""Errors in OpenAI's form, with the status code that fits. No stack trace ever leaves here."""

import math
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import ValidationError

from coterie.errors import (
    Cancelled,
    CoterieError,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    QueueFull,
    RequestError,
    RuntimeFailure,
)

CLIENT_GONE = 499  # nginx's code; the client never sees it


class HttpError(RequestError):
    """A request that HTTP itself makes wrong: size, media type, key."""

    def __init__(self, status: int, message: str, kind: str, code: str | None = None) -> None:
        super().__init__(message)
        self.http_status, self.kind, self.code = status, kind, code


def error_body(error: BaseException) -> tuple[int, dict[str, Any]]:
    """(HTTP status, ``{"error": {...}}``)."""
    param: str | None = None
    code: str | None = None
    message = str(error)
    match error:
        case HttpError():
            status, kind, code = error.http_status, error.kind, error.code
        case InvalidRequest():
            status, kind, param = 400, "invalid_request_error", error.param
            code = error.code
        case NotFound():
            status, kind, code = 404, "invalid_request_error", "not_found"
        case QueueFull():
            status, kind, code = 429, "rate_limit_error", "rate_limit_exceeded"
        case DeadlineExceeded():
            status, kind, code = 504, "timeout_error", "deadline_exceeded"
        case Cancelled():
            status, kind, code = CLIENT_GONE, "cancelled", "cancelled"
        case RuntimeFailure():
            status, kind, code = 503, "service_unavailable_error", "unavailable"
        case _:
            status, kind, code = 500, "internal_error", "internal_error"
            message = message if isinstance(error, CoterieError) else "internal error"
    body = {"message": message, "type": kind, "param": param, "code": code}
    return status, {"error": body}


def error_response(error: BaseException) -> JSONResponse:
    status, body = error_body(error)
    headers = {}
    if isinstance(error, QueueFull):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(body, status_code=status, headers=headers)


def model_not_found(name: str) -> HttpError:
    return HttpError(
        404, f"the model {name!r} does not exist", "invalid_request_error", "model_not_found"
    )


_FORMS = {
    "prompt": "text, a list of texts, a list of token ids (0 or above), or a list of such lists",
    "stop": "text or a list of texts",
    "content": "text or a list of content parts",
}
"""What fields of several forms may be: pydantic complains of the first form only."""


def validation_error(error: ValidationError) -> InvalidRequest:
    """The first complaint, with the field it is about."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    location = [part for part in first["loc"] if not _is_branch(part)]
    names = [part for part in location if isinstance(part, str)]
    if names and names[-1] in _FORMS and first["type"] != "missing":
        while location[-1] != names[-1]:
            location.pop()
        text = f"must be {_FORMS[names[-1]]}"
    else:
        text = str(first["msg"])
    param = ".".join(str(part) for part in location) or None
    return InvalidRequest(f"{param}: {text}" if param else text, param)


def _is_branch(part: str | int) -> bool:
    """Pydantic names the branches of a union inside the location; callers do not know them."""
    return isinstance(part, str) and (part in ("str", "int", "float") or "[" in part)
