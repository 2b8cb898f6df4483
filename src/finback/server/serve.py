"""Runs the server: uvicorn around the application, one model behind it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import sys
from collections.abc import Callable, Generator

import uvicorn

from finback.server.app import create_app
from finback.server.backend import Backend
from finback.server.service import Settings


def serve(
    backend: Backend,
    settings: Settings,
    *,
    host: str,
    port: int,
    drain_seconds: float = 30.0,
    on_start: Callable[[int], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. Then no connection is accepted any more, open requests have `drain_seconds` to
    end, and what is left gets an error. on_start: called with the port once it is open (`port` 0 takes a free one)."""
    app = create_app(backend, settings)
    config = uvicorn.Config(
        app, host=host, port=port, log_config=None, access_log=False, timeout_graceful_shutdown=int(drain_seconds) + 5
    )
    server = _Server(config, app.state.service.stop, drain_seconds, on_start)
    # Whatever exists now stays to the end. Left among what the garbage collector looks through, it makes every stream
    # wait for a tenth of a second now and then.
    gc.collect()
    gc.freeze()
    asyncio.run(server.serve())


class _Server(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        stop: Callable[[], None],
        drain_seconds: float,
        on_start: Callable[[int], None] | None,
    ):
        super().__init__(config)
        self._stop, self._drain_seconds, self._on_start = stop, drain_seconds, on_start

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Stop on the first signal and end with exit code 0; uvicorn's own would raise the signal again at the end."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list | None = None) -> None:
        await super().startup(sockets)
        if self._on_start is not None and self.started:
            self._on_start(self.servers[0].sockets[0].getsockname()[1])

    async def shutdown(self, sockets: list | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(self._drain_seconds, self._stop)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def set_up_logs(level: str) -> None:
    """Log lines on stderr, one a request as JSON. For the command line; a library leaves logging alone."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    for name in ("finback", "uvicorn"):
        found = logging.getLogger(name)
        found.addHandler(handler)
        found.setLevel(level.upper())
