"""Images by address: what a request may make the server fetch.

Would catch: a request that reads a file of the server, reaches its neighbours, gets there by a redirect or by a name
that resolves to a private address, or fills its memory.
"""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from finback.base.runtime import RequestError
from finback.server import remote


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("/etc/passwd", "files are not read"),
        ("file:///etc/passwd", "files are not read"),
        ("ftp://example.com/x", "files are not read"),
        ("http://example.com/x.png", "--allow-remote-images"),
        ("data:image/png,plain", "only base64"),
        ("data:image/png;base64,????", "cannot be read"),
        ("data:image/png;base64," + "A" * 3000, "larger than 1000 bytes"),
    ],
)
def test_what_is_not_fetched(url: str, problem: str):
    with pytest.raises(RequestError, match=problem):
        remote.image_bytes(url, remote=False, max_bytes=1000)


@pytest.mark.parametrize(
    "address",
    "127.0.0.1 10.1.2.3 192.168.0.1 172.16.0.1 169.254.169.254 0.0.0.0 100.64.0.1 224.0.0.1 ::1 fe80::1%eth0 fc00::1 "
    "::ffff:127.0.0.1 ::ffff:10.0.0.1".split(),
)
def test_private_addresses_are_refused(address: str):
    """Also where the name has a public address beside it."""
    for found in ([address], ["93.184.216.34", address]):
        with pytest.raises(RequestError, match="not on the public internet"):
            remote.public_address("name", 80, lambda host, port, found=found: found)


@pytest.mark.parametrize("url", ["http://user:key@a/x", "http:///x", "http://a:99999/x", "http://[::1", "https://"])
def test_odd_addresses_are_refused(url: str):
    with pytest.raises(RequestError):
        remote.fetch(url, max_bytes=10, timeout=1, resolve=lambda host, port: ["93.184.216.34"])


class Site(http.server.BaseHTTPRequestHandler):
    asked: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers["Host"]))
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
            return
        self.send_response(200 if self.path != "/missing" else 404)
        self.end_headers()
        self.wfile.write(b"x" * 50)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.fixture
def fetch(port: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`fetch` in a world where `good` is public and `evil` is not; both lead to the site of this test."""
    real = remote.public_address

    def resolve(host: str, _: int) -> list[str]:
        return {"good": ["93.184.216.34"], "evil": ["10.0.0.1"]}[host]

    def checked(host: str, number: int, resolver: Any) -> str:
        real(host, number, resolver)
        return "127.0.0.1"

    monkeypatch.setattr(remote, "public_address", checked)
    return lambda path, size=100: remote.fetch(f"http://good:{port}{path}", max_bytes=size, timeout=5, resolve=resolve)


def test_a_public_image_is_fetched_by_its_checked_address(fetch: Any, port: int):
    """The connection goes to the address that was checked, the Host header keeps the name."""
    assert fetch("/a?b=1") == b"x" * 50
    assert Site.asked[-1] == ("/a?b=1", f"good:{port}")
    assert fetch(f"/to/http://good:{port}/a") == b"x" * 50


@pytest.mark.parametrize(
    ("path", "size", "problem"),
    [
        ("/to/http://evil:{port}/secret", 100, "not on the public internet"),
        ("/to/file:///etc/passwd", 100, "http"),
        ("/to//to//to//to//to//x", 100, "redirects more than"),
        ("/a", 49, "larger than 49"),
        ("/missing", 100, "HTTP 404"),
    ],
)
def test_what_a_public_site_cannot_make_it_do(fetch: Any, port: int, path: str, size: int, problem: str):
    with pytest.raises(RequestError, match=problem):
        fetch(path.format(port=port), size)
    assert not any(path == "/secret" for path, _ in Site.asked)
