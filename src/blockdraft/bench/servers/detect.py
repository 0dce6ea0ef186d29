"""Which engine answers at an address: named by the user, or by evidence of a fixed table; never guessed.

Owns the table and what has to be known before the first request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockdraft.bench.servers.adapter import Adapter, Page
from blockdraft.bench.servers.client import Client
from blockdraft.bench.servers.connection import Connection
from blockdraft.bench.servers.llama_cpp import LlamaCpp
from blockdraft.bench.servers.mistral_rs import MistralRs
from blockdraft.bench.servers.ours import Ours
from blockdraft.bench.servers.server import Server
from blockdraft.bench.servers.sglang import Sglang
from blockdraft.bench.servers.tensorrt_llm import TensorRtLlm
from blockdraft.bench.servers.tokenspeed import TokenSpeed
from blockdraft.bench.servers.vllm import Vllm
from blockdraft.errors import RequestError, UnavailableError, shown

__all__ = ["ENGINES", "connect", "evidence"]

ENGINES: Mapping[str, Adapter] = {
    adapter.name: adapter
    for adapter in (Ours(), Vllm(), Sglang(), TokenSpeed(), LlamaCpp(), MistralRs(), TensorRtLlm())
}


def connect(
    url: str,
    *,
    engine: str | None = None,
    model: str | None = None,
    plain_url: str | None = None,
    effort: str | None = None,
) -> Server:
    """The server at an address, and one without a draft at `plain_url` for its plain decoding.

    `effort` is the word for its highest reasoning effort, or "none" to send nothing. Raises UnavailableError where
    nobody answers, RequestError where it cannot be told which engine or model it is.
    """
    main = _connection(url, engine, model)
    if plain_url is None:
        return Server(main, effort=effort)
    plain = _connection(plain_url, engine, None)
    if plain.adapter.name != main.adapter.name:
        raise RequestError(
            f"{plain_url} is {plain.adapter.name} and {url} {main.adapter.name}; a speed-up needs the same engine"
        )
    return Server(main, plain, effort=effort)


def evidence(models: Any, metrics: str) -> dict[str, str]:
    """Engine -> what says so: `owned_by` of its models, or the prefix of its counters."""
    found: dict[str, str] = {}
    cards = models.get("data") if isinstance(models, Mapping) else None
    owners = {str(card.get("owned_by")) for card in cards or () if isinstance(card, Mapping)}
    for name, adapter in ENGINES.items():
        if adapter.owned_by in owners:
            found[name] = f"/v1/models is owned by {adapter.owned_by}"
        elif adapter.metrics_prefix is not None and _has_prefix(metrics, adapter.metrics_prefix):
            found[name] = f"/metrics has {adapter.metrics_prefix}"
    return found


def _has_prefix(metrics: str, prefix: str) -> bool:
    return any(line.startswith(prefix) for line in metrics.splitlines())


def _connection(url: str, engine: str | None, model: str | None) -> Connection:
    if engine is not None and engine not in ENGINES:
        raise RequestError(f"engine {shown(engine)} is unknown; there are {', '.join(ENGINES)}")
    client = Client(url)
    models = client.page("/v1/models")
    if models is None:
        raise UnavailableError(f"{client.url}/v1/models is not there; --url must name an OpenAI-compatible server")
    metrics = client.page("/metrics")
    if engine is None:
        found = evidence(models.json, "" if metrics is None else metrics.text)
        if len(found) != 1:
            said = "; ".join(f"{name}: {why}" for name, why in found.items()) or "nothing that it shows says so"
            raise RequestError(
                f"which engine {client.url} is cannot be told ({said}); name it with --engine: {', '.join(ENGINES)}"
            )
        [engine] = found
    adapter = ENGINES[engine]
    pages: dict[str, Page] = {"/v1/models": models}
    pages |= {path: page for path in adapter.pages if (page := client.page(path)) is not None}
    return Connection(
        client=client,
        adapter=adapter,
        model=_model(models.json, model, client.url),
        facts=adapter.facts({path: page for path, page in pages.items() if isinstance(page.json, Mapping)}),
        has_metrics=metrics is not None and adapter.counters is not None,
    )


def _model(models: Any, asked: str | None, url: str) -> str:
    cards = models.get("data") if isinstance(models, Mapping) else None
    names = [str(card["id"]) for card in cards or () if isinstance(card, Mapping) and "id" in card]
    if asked is not None:
        if names and asked not in names:
            raise RequestError(f"{url} has no model {shown(asked)}; it has {', '.join(names[:8])}")
        return asked
    if len(names) != 1:
        raise RequestError(f"{url} has {len(names)} models; name one with --model: {', '.join(names[:8])}")
    return names[0]
