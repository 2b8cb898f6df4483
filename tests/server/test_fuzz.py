"""Requests made from the served OpenAPI document, by schemathesis: whatever it thinks of, no answer is a 5xx.

Would catch: an exception that a request of the right shape and an odd content causes. Takes about a minute, so it is
left out unless asked for: pytest -m slow tests/server/test_fuzz.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis: pip install '.[extended]'")
pytestmark = pytest.mark.slow

USER = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def http(kit: Any) -> Iterator[httpx.Client]:
    with kit.running(kit.FakeBackend()) as client:
        yield client


def test_no_server_error(http: httpx.Client):
    """Every operation; after all of them an ordinary request is answered."""
    schema = schemathesis.openapi.from_url(f"{http.base_url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) >= 10
    for operation in operations:

        @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy())
        def run(case: Any) -> None:
            response = case.call(base_url=str(http.base_url))
            assert response.status_code < 500, (case.method, case.path, case.body, response.text)

        run()
    assert http.post("/v1/chat/completions", json=USER).status_code == 200
