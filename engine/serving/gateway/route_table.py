"""The table of routes: what is served, to which roles, with which bodies. Anything else answers 404.

vLLM's app has many more routes, some of which load adapters, generate without our checks, or stop the
engine. A new version's new routes are closed until they are added here.
"""

from dataclasses import dataclass, field
from enum import Enum

from engine.serving.gateway import request_fields
from engine.serving.gateway.asgi import MAX_BODY
from engine.serving.gateway.request_fields import Fields

SMALL_BODY = 64 << 10
# Token ids in and out, for what trains and scores.
SAMPLES = "/graftwork/samples"
# Answers with `choices`: their streams have usage when `stream_options` ask, those of others always do.
OF_CHOICES = ("/v1/completions", "/v1/chat/completions")


class Kind(Enum):
    """What the gateway does with a request: pass it on, count its tokens, or have a revision answer it."""

    PASS = "pass"
    TOKENIZE = "tokenize"
    GENERATE = "generate"


@dataclass(frozen=True)
class Endpoint:
    """One path (with `is_prefix`, all paths below it) and its rules.

    `roles`: a key needs one of them; empty: no key is needed. `fields` None: our own endpoint checks its
    body. `id_prefix` begins the answer's `id`; `tokens` is vLLM's default number of tokens to generate, and
    `length` the field that says another.
    """

    path: str
    methods: frozenset[str]
    roles: tuple[str, ...]
    kind: Kind = Kind.PASS
    most_body: int = SMALL_BODY
    fields: Fields | None = None
    id_prefix: str = ""
    tokens: int | None = None
    length: str = "max_tokens"
    is_prefix: bool = field(default=False)


# What is not served.
NOWHERE = Endpoint("", frozenset(), ())
GET, POST = frozenset({"GET"}), frozenset({"POST"})
ROUTES = (
    # Without a key: health checks, and the marker by which our commands recognise the engine.
    Endpoint("/health", GET, ()),
    Endpoint("/ping", GET | POST, ()),
    Endpoint("/version", GET, ()),
    Endpoint("/graftwork/marker", GET, ()),
    # Load balancers ask it.
    Endpoint("/graftwork/ready", GET, ()),
    Endpoint("/graftwork/drain", POST, ("admin",)),
    # Users' text, for who judges answers.
    Endpoint("/graftwork/copies", POST, ("admin",)),
    Endpoint("/metrics", GET, ("metrics",)),
    Endpoint("/graftwork/residency", GET, ("metrics",)),
    Endpoint("/graftwork/loads", GET, ("metrics",)),
    Endpoint("/v1/models", GET, ("infer",)),
    Endpoint("/v1/models/", GET, ("infer",), is_prefix=True),
    Endpoint("/v1/feedback", POST, ("feedback",)),
    Endpoint("/v1/prewarm", POST, ("infer",)),
    # All adapters have their base's tokenizer, so no adapter is loaded.
    Endpoint("/tokenize", POST, ("infer",), Kind.TOKENIZE, MAX_BODY, request_fields.TOKENIZE),
    Endpoint("/detokenize", POST, ("infer",), Kind.TOKENIZE, MAX_BODY, request_fields.DETOKENIZE),
    Endpoint(
        "/v1/messages/count_tokens", POST, ("infer",), Kind.TOKENIZE, MAX_BODY, request_fields.COUNTED
    ),
    Endpoint(
        "/v1/completions", POST, ("infer", "score", "train"), Kind.GENERATE, MAX_BODY,
        request_fields.COMPLETION, "cmpl-", tokens=16,
    ),
    Endpoint(
        "/v1/chat/completions", POST, ("infer", "score", "train"), Kind.GENERATE, MAX_BODY,
        request_fields.CHAT, "chatcmpl-", length="max_completion_tokens",
    ),
    Endpoint(
        "/v1/responses", POST, ("infer",), Kind.GENERATE, MAX_BODY, request_fields.RESPONSES, "resp_",
        length="max_output_tokens",
    ),
    Endpoint("/v1/messages", POST, ("infer",), Kind.GENERATE, MAX_BODY, request_fields.MESSAGES, "chatcmpl-"),
    Endpoint(SAMPLES, POST, ("score", "train"), Kind.GENERATE, MAX_BODY, request_fields.SAMPLES, "samples-"),
)  # fmt: skip
GENERATING = tuple(route.path for route in ROUTES if route.kind is Kind.GENERATE and route.path != SAMPLES)


class RouteTable(dict[str, Endpoint]):
    """The route of each path; of one that nothing serves, `NOWHERE`."""

    def __missing__(self, path: str) -> Endpoint:
        """Return the route of the paths below another one, if this is one of them."""
        prefixes = (one for one in ROUTES if one.is_prefix and path.startswith(one.path) and path != one.path)
        return next(prefixes, NOWHERE)


ROUTE_OF = RouteTable({route.path: route for route in ROUTES if not route.is_prefix})
