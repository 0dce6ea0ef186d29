"""The OpenAPI document, and what it promises held against random requests (schemathesis)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from blockdraft.engine import load
from blockdraft.serve.fields import REFUSED
from blockdraft.serve.wire import ChatRequest, CompletionRequest
from serve_kit import Running, running
from tiny_pair import TinyPair

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def server(tiny_pair: TinyPair) -> Iterator[Running]:
    with running(load(tiny_pair.draft, tiny_pair.target), max_tokens=16, max_n=2, max_prompts=2) as made:
        yield made


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_random_requests_keep_to_the_document(server: Running, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {operation.path for operation in operations} >= {"/v1/chat/completions", "/v1/completions", "/v1/models"}
    statuses: list[int] = []
    for operation in operations:
        if mode is GenerationMode.NEGATIVE and operation.method != "post":
            continue

        @settings(
            max_examples=30 if operation.method == "post" else 3,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def run(case: schemathesis.Case) -> None:
            response = case.call(timeout=30)
            statuses.append(response.status_code)
            more = [negative_data_rejection] if mode is GenerationMode.NEGATIVE else []
            case.validate_response(response, checks=[*CHECKS, *more])

        run()
    assert 400 in statuses and (200 in statuses or mode is GenerationMode.NEGATIVE)
    server.wait_until(lambda: server.service.loop.num_open == 0)


def test_no_field_is_both_served_and_refused() -> None:
    for model in (ChatRequest, CompletionRequest):
        assert not set(model.model_fields) & set(REFUSED)
