"""Errors as OpenAI's clients read them. Plain Python, no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from finback.base.runtime import FinbackError, RequestError


class ApiError(Exception):
    """An answer that is an error.

    status: HTTP status. param: the field of the request that is to blame, e.g. "messages[2].content". code: a short
    word for programs. retry_after: seconds after which the client may try again.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int = 0,
    ):
        super().__init__(message)
        self.message, self.status, self.param, self.code, self.retry_after = message, status, param, code, retry_after

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def moved(self, origins: Sequence[str] | None) -> ApiError:
        """The same error about the request that the messages come from: origins[i] is the field of messages[i]."""
        found = None if origins is None or self.param is None else _MESSAGE.match(self.param)
        if origins is None or found is None:
            return self
        field = origins[int(found[1])]
        message = self.message.replace(found[0], field)
        return ApiError(message, status=self.status, param=field, code=self.code, retry_after=self.retry_after)

    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(self.retry_after)} if self.retry_after else {}


_MESSAGE = re.compile(r"messages\[(\d+)\]")
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "server_error"}


def as_api_error(error: Exception, param: str | None = None) -> ApiError:
    """What a client is told about any error: what it can mend as it is, everything else without its inner life."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(str(error), param=param)
    if isinstance(error, FinbackError):
        return ApiError(str(error), status=500, code=type(error).__name__)
    return ApiError("the server failed on this request; its log says why", status=500, code="internal_error")
