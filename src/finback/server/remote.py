"""Images that a request names by URL. Local paths are never read; web addresses only where the server allows it."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable
from urllib.parse import SplitResult, urljoin, urlsplit

from finback.base.runtime import RequestError

MAX_REDIRECTS = 3
Resolve = Callable[[str, int], list[str]]


def image_bytes(url: str, *, remote: bool, max_bytes: int, timeout: float = 10.0) -> bytes:
    """The bytes behind an image URL of a request.

    Args:
        url: a base64 data URL; http(s) where `remote` allows it.
        max_bytes: larger images are refused.
        timeout: seconds for connecting, and for reading.

    Raises:
        RequestError: any other kind of URL, a private address, too large, not reachable.
    """
    from finback.io.images import decode_base64

    if url.startswith("data:"):
        if len(url) > max_bytes * 4 // 3 + 200:
            raise RequestError(f"the image is larger than {max_bytes} bytes; shrink it first")
        return decode_base64(url)
    if not url.startswith(("http://", "https://")):
        raise RequestError("an image is sent as a data URL: data:image/png;base64,<characters>; files are not read")
    if not remote:
        raise RequestError(
            "this server does not fetch images from the web; send a data URL, or start it with --allow-remote-images"
        )
    return fetch(url, max_bytes=max_bytes, timeout=timeout)


def fetch(url: str, *, max_bytes: int, timeout: float, resolve: Resolve | None = None) -> bytes:
    """The body behind a public web address. Every host on the way, redirects included, is resolved once, must have
    public addresses only, and is connected to by that address, so that a name cannot change its mind in between."""
    for _ in range(MAX_REDIRECTS + 1):
        parts = _checked(url)
        address = public_address(parts.hostname or "", parts.port or _PORTS[parts.scheme], resolve or _resolve)
        try:
            status, location, body = _get(parts, address, max_bytes, timeout)
        except (OSError, http.client.HTTPException) as error:
            raise RequestError(f"the image at {parts.hostname} could not be fetched ({type(error).__name__})") from None
        if status == 200:
            return body
        if location is None or status not in (301, 302, 303, 307, 308):
            raise RequestError(f"the image at {parts.hostname} could not be fetched (HTTP {status})")
        url = urljoin(url, location)
    raise RequestError(f"the image's address redirects more than {MAX_REDIRECTS} times")


_PORTS = {"http": 80, "https": 443}


def _checked(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise RequestError("the image's address is not a valid URL") from None
    if parts.scheme not in _PORTS or not parts.hostname or parts.username is not None:
        raise RequestError("an image's address must be http(s)://host/path, without a user name")
    return parts


def public_address(host: str, port: int, resolve: Resolve) -> str:
    """One address of `host`. Raises RequestError unless all of them are on the public internet."""
    try:
        addresses = resolve(host, port)
    except (OSError, UnicodeError):
        raise RequestError(f"the image's host {host!r} cannot be resolved") from None
    for address in addresses:
        found = ipaddress.ip_address(address.partition("%")[0])
        mapped = getattr(found, "ipv4_mapped", None) or found
        if not mapped.is_global or mapped.is_multicast:
            raise RequestError(f"the image's host {host!r} is not on the public internet, so it is not fetched")
    if not addresses:
        raise RequestError(f"the image's host {host!r} cannot be resolved")
    return addresses[0]


def _resolve(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _get(parts: SplitResult, address: str, max_bytes: int, timeout: float) -> tuple[int, str | None, bytes]:
    """(status, where it redirects to, body) of one GET, connected to `address`."""
    port = parts.port or _PORTS[parts.scheme]
    connection = http.client.HTTPConnection(parts.hostname or "", port, timeout=timeout)
    connection.sock = socket.create_connection((address, port), timeout)
    try:
        if parts.scheme == "https":
            context = ssl.create_default_context()
            connection.sock = context.wrap_socket(connection.sock, server_hostname=parts.hostname)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", path, headers={"Accept": "image/*", "Host": parts.netloc})
        response = connection.getresponse()
        body, deadline = b"", time.monotonic() + timeout
        while chunk := response.read(1 << 16):
            body += chunk
            if len(body) > max_bytes:
                raise RequestError(f"the image at {parts.hostname} is larger than {max_bytes} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError
        return response.status, response.getheader("Location"), body
    finally:
        connection.close()
