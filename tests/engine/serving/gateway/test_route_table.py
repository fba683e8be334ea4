"""The table of routes against vLLM's app as the server builds it: nothing else is open."""

from argparse import Namespace

import pytest
from fastapi import FastAPI
from starlette.routing import Mount, WebSocketRoute

from engine.serving.gateway.route_table import NOWHERE, ROUTE_OF, ROUTES

# What vLLM 0.32.0 has beside the table with our options; all of it answers 404, a WebSocket 403. A new route
# fails the test until it is in this list or in the table.
CLOSED = {
    "/docs", "/docs/oauth2-redirect", "/openapi.json", "/redoc", "/load", "/kv_event_sources",
    "/scale_elastic_ep", "/is_scaling_elastic_ep",
    "/invocations", "/v1/systemone", "/generative_scoring",
    "/v1/chat/completions/batch", "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel",
    "/inference/v1/generate", "/inference/v1/abort_requests",
    "/v1/chat/completions/render", "/v1/completions/render", "/v1/messages/render", "/v1/responses/render",
    "/v1/chat/completions/derender", "/v1/completions/derender",
}  # fmt: skip


@pytest.fixture(scope="module")
def app() -> FastAPI:
    """vLLM's app with our routes, built as `engine.serving.server` has it built, without an engine."""
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from engine.serving.gateway.endpoints import attach

    args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args(["--enable-lora"])
    built = build_app(args, ("generate",))
    attach(built)
    return built


def paths_of(app: FastAPI) -> set[str]:
    return {getattr(route, "path", "") for route in flat(app.routes)}


def flat(routes: list) -> list:
    found = []
    for route in routes:
        found += flat(route.routes) if isinstance(route, Mount) and route.routes else [route]
    return found


def test_every_route_of_the_app_is_in_the_table_or_closed(app: FastAPI) -> None:
    known = {route.path.removesuffix("/") for route in ROUTES} | {"/v1/models/{name:path}"}
    assert paths_of(app) - known - CLOSED == set()
    assert paths_of(app) >= CLOSED


def test_every_row_of_the_table_is_a_route_of_the_app(app: FastAPI) -> None:
    served = {
        (route.path, method) for route in flat(app.routes) for method in getattr(route, "methods", None) or ()
    }
    # Prometheus' app is mounted, and takes GET.
    served.add(("/metrics", "GET"))
    for row in ROUTES:
        path = "/v1/models/{name:path}" if row.is_prefix else row.path
        assert {method for where, method in served if where == path} >= row.methods, path


def test_no_websocket_is_in_the_table(app: FastAPI) -> None:
    sockets = {route.path for route in flat(app.routes) if isinstance(route, WebSocketRoute)}
    assert all(ROUTE_OF[path] is NOWHERE for path in sockets)


@pytest.mark.parametrize(
    "path", ["/v1/models/", "/v1//completions", "/V1/completions", "/v1/completions/", "/health/"]
)
def test_other_spellings_are_no_routes(path: str) -> None:
    assert ROUTE_OF[path] is NOWHERE


def test_a_field_of_the_table_is_one_of_vllms() -> None:
    """A field that vLLM renames would be refused by name and never reach it."""
    from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    models = {
        "/v1/completions": CompletionRequest, "/v1/chat/completions": ChatCompletionRequest,
        "/v1/responses": ResponsesRequest, "/v1/messages": AnthropicMessagesRequest,
        "/v1/messages/count_tokens": AnthropicCountTokensRequest,
    }  # fmt: skip
    for row in ROUTES:
        if row.path in models:
            assert row.fields is not None
            unknown = row.fields.keys() - models[row.path].model_fields.keys()
            assert unknown <= {"conversation"}, (row.path, unknown)
            assert "cache_salt" not in row.fields
            assert "cache_salt" in models[row.path].model_fields or row.path.endswith("count_tokens")
