"""HTTP to one server: its pages, and streamed answers. Owns every use of httpx; it is imported at the first request.

What went wrong with a request is an AnswerError whose words quote nothing of the request or the answer.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from blockdraft.bench.servers.adapter import Page
from blockdraft.bench.servers.answer import Answer, AnswerError
from blockdraft.errors import RequestError, UnavailableError, shown

if TYPE_CHECKING:
    import httpx

__all__ = ["KEY_VARIABLE", "Client"]

KEY_VARIABLE = "BLOCKDRAFT_API_KEY"
CONNECT_S, PAGE_S, ANSWER_S = 10.0, 30.0, 900.0  # the last one: between two pieces of an answer
_CODE = re.compile(r"^[A-Za-z_]{1,40}$")


class Client:
    """A server's address. `url` may end in /v1. The key, if any, is in the environment: BLOCKDRAFT_API_KEY."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise RequestError(f"--url is {shown(url)}; give an address such as http://127.0.0.1:8000")
        if parts.username or parts.password:
            raise RequestError(f"--url holds a name or password; put a key into {KEY_VARIABLE} instead")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._httpx = _load_httpx()
        self._is_encrypted = parts.scheme == "https"
        self._pages: httpx.Client | None = None

    def _options(self) -> dict[str, Any]:
        key = os.environ.get(KEY_VARIABLE)
        limits = self._httpx.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = self._httpx.Timeout(ANSWER_S, connect=CONNECT_S)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        # Certificates are read from disk for nothing where the address needs none.
        return {
            "base_url": self.url,
            "timeout": timeout,
            "limits": limits,
            "headers": headers,
            "verify": self._is_encrypted,
        }

    def open(self) -> httpx.AsyncClient:
        """For many requests at once; to be closed by the caller."""
        return self._httpx.AsyncClient(**self._options())

    # ---- pages -------------------------------------------------------------------------------------------------------
    def page(self, path: str, body: Mapping[str, Any] | None = None) -> Page | None:
        """A page, None where the server has none. Raises UnavailableError where nobody answers, or not to us."""
        httpx = self._httpx
        try:
            if self._pages is None:
                self._pages = httpx.Client(**self._options())
            response = self._pages.request("GET" if body is None else "POST", path, json=body, timeout=PAGE_S)
        except httpx.HTTPError as error:
            raise UnavailableError(f"{self.url} does not answer ({_reason(error)}); is the server running?") from None
        if response.status_code in (401, 403):
            raise UnavailableError(f"{self.url} wants a key; put it into {KEY_VARIABLE}")
        if response.status_code >= 300:
            return None
        try:
            found = response.json()
        except ValueError:
            found = None
        return Page(found, response.text, {name.lower(): value for name, value in response.headers.items()})

    async def metrics(self, http: httpx.AsyncClient) -> str | None:
        """The text of /metrics, None where it cannot be read."""
        try:
            response = await http.get("/metrics", timeout=PAGE_S)
        except self._httpx.HTTPError:
            return None
        return response.text if response.status_code == 200 else None

    # ---- answers -----------------------------------------------------------------------------------------------------
    async def ask(
        self, http: httpx.AsyncClient, path: str, body: Mapping[str, Any], answer: Answer, now_s: Callable[[], float]
    ) -> None:
        """Stream an answer into `answer`. Raises AnswerError; what came until then stays in it."""
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        httpx = self._httpx
        try:
            async with http.stream("POST", path, json=asked) as response:
                if response.status_code != 200:
                    raise _refused(response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        break
                    answer.take(_parsed(data), now_s())
        except httpx.TransportError as error:
            is_gone = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            raise AnswerError(f"the connection broke ({_reason(error)})", is_gone=is_gone) from None
        except httpx.HTTPError as error:
            raise AnswerError(f"the answer could not be read ({_reason(error)})") from None
        answer.check_whole()


def _load_httpx() -> Any:
    try:
        import httpx
    except ImportError:
        raise UnavailableError(
            "measuring a server needs httpx, which is not installed: pip install 'blockdraft[bench]'"
        ) from None
    return httpx


def _reason(error: Exception) -> str:
    return type(error).__name__


def _parsed(data: str) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        raise AnswerError("a chunk of the stream is no JSON") from None


def _refused(status: int, body: bytes) -> AnswerError:
    """HTTP status and error code; the message may quote the request and is the detail."""
    try:
        found = json.loads(body)
        error = found.get("error", found)
        names = [error.get(name) for name in ("code", "type")] if isinstance(error, Mapping) else []
        message = error.get("message") if isinstance(error, Mapping) else error
    except (ValueError, AttributeError):
        names, message = [], ""
    code = next((name for name in names if isinstance(name, str) and _CODE.match(name)), None)
    words = f"the server answered {status}" + (f" ({code})" if code else "")
    return AnswerError(words, detail=" ".join(str(message or "").split())[:200])
