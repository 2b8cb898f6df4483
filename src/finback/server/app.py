"""The HTTP interface: OpenAI's endpoints over a `Backend`.

Errors have OpenAI's shape. Keys are asked for by everything that reaches the model; /health, /ready, /version and
/metrics are open, as monitors need them.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from finback.server import anthropic
from finback.server import protocol as p
from finback.server.backend import Backend
from finback.server.errors import ApiError, as_api_error
from finback.server.responses import ResponsesRequest
from finback.server.service import Service, Settings, logger


def create_app(backend: Backend, settings: Settings | None = None) -> FastAPI:
    """The application. Its `state.service` can be told to stop (`Service.stop`)."""
    service = Service(backend, settings or Settings())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        yield
        service.stop()
        backend.close()

    app = FastAPI(title="finback", version=service.settings.version, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    _add_errors(app)
    _add_model_routes(app, service)
    _add_monitor_routes(app, service)
    return app


def _add_errors(app: FastAPI) -> None:
    def answer(request: Request, error: ApiError) -> JSONResponse:
        body = anthropic.error_body(error) if request.url.path.startswith("/v1/messages") else error.body()
        return JSONResponse(body, error.status, error.headers())

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return answer(request, ApiError(error.detail, status=error.status_code))

    async def on_any(request: Request, error: Exception) -> JSONResponse:
        found = as_api_error(error)
        if found.code == "internal_error":
            logger.error("%s failed", request.url.path, exc_info=error)
        return answer(request, found)

    app.add_exception_handler(HTTPException, on_http)
    for kind in (ApiError, ValueError, Exception):
        app.add_exception_handler(kind, on_any)


def _add_model_routes(app: FastAPI, service: Service) -> None:
    backend = service.backend

    async def read(request: Request, kind: type[p.R]) -> p.R:
        _check_key(request, service.settings.api_keys)
        found = p.read_request(await _body(request, service.settings.max_body_bytes), kind)
        name = getattr(found, "model", None)
        if name is not None and name != backend.model:
            raise ApiError(
                f"there is no model {name!r} here; this server runs {backend.model!r}",
                status=404, param="model", code="model_not_found",
            )  # fmt: skip
        return found

    def takes(path: str, kind: type[p.Strict]) -> Callable[..., Any]:
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        parts = schema.pop("$defs", {})
        app.state.schemas = {**getattr(app.state, "schemas", {}), **parts}
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        errors = {code: {"description": text} for code, text in _STATUSES.items()}
        return app.post(path, openapi_extra={"requestBody": body}, responses=errors)

    @takes("/v1/chat/completions", p.ChatRequest)
    async def chat_completions(request: Request) -> Response:
        return service.chat(await read(request, p.ChatRequest))

    @takes("/v1/completions", p.CompletionRequest)
    async def completions(request: Request) -> Response:
        return service.complete(await read(request, p.CompletionRequest))

    @takes("/v1/responses", ResponsesRequest)
    async def responses(request: Request) -> Response:
        return service.responses(await read(request, ResponsesRequest))

    @takes("/v1/messages", anthropic.MessagesRequest)
    async def messages(request: Request) -> Response:
        return service.messages(await read(request, anthropic.MessagesRequest))

    @takes("/v1/messages/count_tokens", anthropic.CountRequest)
    async def count_tokens(request: Request) -> Response:
        return JSONResponse(await service.count_tokens(await read(request, anthropic.CountRequest)))

    @takes("/tokenize", p.TokenizeRequest)
    async def tokenize(request: Request) -> Response:
        return JSONResponse(await service.tokenize(await read(request, p.TokenizeRequest)))

    @takes("/detokenize", p.DetokenizeRequest)
    async def detokenize(request: Request) -> Response:
        return JSONResponse(service.detokenize(await read(request, p.DetokenizeRequest)))

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        _check_key(request, service.settings.api_keys)
        return JSONResponse({"object": "list", "data": [service.model_card()]})

    @app.get("/v1/models/{name:path}", responses={404: {"description": _STATUSES[404]}})
    async def model(request: Request, name: str) -> Response:
        _check_key(request, service.settings.api_keys)
        if name != backend.model:
            raise ApiError(f"there is no model {name!r} here", status=404, code="model_not_found")
        return JSONResponse(service.model_card())

    document = app.openapi

    def openapi() -> dict[str, Any]:
        found = document()
        found.setdefault("components", {}).setdefault("schemas", {}).update(app.state.schemas)
        return found

    app.openapi = openapi  # type: ignore[method-assign]


_STATUSES: dict[int | str, str] = {
    400: "The request cannot be served; `param` names the field.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    413: "The body is too large.",
    429: "Too many requests are open.",
    503: "The server is stopping.",
    504: "The answer took too long.",
}


def _add_monitor_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if service.backend.alive else 503)

    @app.get("/ready")
    async def ready() -> Response:
        return Response(status_code=200 if service.backend.alive and not service.stopping else 503)

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": service.settings.version})

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(service.metrics.page(), media_type="text/plain; version=0.0.4")

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        text = resources.files("finback.server").joinpath("static/chat.html").read_text(encoding="utf-8")
        return HTMLResponse(text, headers={"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"})


# The page is one file: nothing is loaded from elsewhere, and nothing is sent elsewhere.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def _check_key(request: Request, keys: tuple[str, ...]) -> None:
    if not keys:
        return
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    if not given:
        kind, given = "bearer", request.headers.get("x-api-key", "")  # as clients of Anthropic's interface send it
    # Every key is compared, in constant time, so that timing tells nothing.
    right = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in keys]
    if kind.lower() != "bearer" or not any(right):
        raise ApiError("the API key is missing or wrong; send Authorization: Bearer KEY", status=401)


async def _body(request: Request, limit: int) -> bytes:
    """The body of a request. Raises ApiError (413) as soon as it is too large."""
    declared = request.headers.get("content-length", "")
    too_large = ApiError(f"the body is larger than {limit} bytes", status=413, code="body_too_large")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise too_large
        parts.append(part)
    return b"".join(parts)
