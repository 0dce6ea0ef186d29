"""The playground page at /: its files and the headers they are served with.

Owns paths, media types, caching and the page's security policy. What the page does is in page/; it talks to the API
like any client. Files lie under the hash of all of them, so they never change and may be kept for ever; only the page
itself is asked for again.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from fastapi import FastAPI, HTTPException, Request, Response

__all__ = ["CONTENT_SECURITY_POLICY", "add_page"]

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml; charset=utf-8",
}
_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_FOLDER = Path(__file__).with_name("page")
_INDEX = "index.html"
_FOREVER = "public, max-age=31536000, immutable"


def add_page(app: FastAPI) -> None:
    """Serve the page at / and its files under /page/HASH/; neither is part of the API's schema."""
    files = {path.name: path.read_bytes() for path in sorted(_FOLDER.iterdir()) if path.suffix in MEDIA_TYPES}
    bundle = _digest(b"".join(name.encode() + b"\0" + content + b"\0" for name, content in files.items()))
    index = files.pop(_INDEX).replace(b'"page/', b'"page/' + bundle.encode() + b"/")

    async def show_index(request: Request) -> Response:
        return _answer(request, _INDEX, index, "no-cache")

    async def show_file(request: Request, version: str, name: str) -> Response:
        if version != bundle or name not in files:
            raise HTTPException(404)
        return _answer(request, name, files[name], _FOREVER)

    methods = ["GET", "HEAD"]
    app.add_api_route("/", show_index, methods=methods, include_in_schema=False)
    app.add_api_route("/page/{version}/{name}", show_file, methods=methods, include_in_schema=False)


def _answer(request: Request, name: str, content: bytes, cache_control: str) -> Response:
    tag = f'"{_digest(content)}"'
    headers = {**_HEADERS, "Cache-Control": cache_control, "ETag": tag}
    known = {item.strip().removeprefix("W/") for item in request.headers.get("If-None-Match", "").split(",")}
    if tag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=MEDIA_TYPES[Path(name).suffix])


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
