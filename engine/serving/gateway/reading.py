"""The second stage: what is asked for. It reads the body within bounds and checks every field of it.

A body of 8 MiB of empty lists takes seconds to parse, which stops the event loop. What a client without the
roles `score` and `train` sends has to fit the base's context, so its bound follows from that.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import orjson

from engine.catalog.catalog import Key
from engine.serving.gateway.answers import AnswerReader, wants_json
from engine.serving.gateway.asgi import MAX_BODY, Receive, Refused
from engine.serving.gateway.call import Call, Size, require
from engine.serving.gateway.constraints import FIELDS, constraints_of
from engine.serving.gateway.request_depth import MOST_DEPTH, is_deeper
from engine.serving.gateway.request_fields import DROPPED, ROUTERS_OWN, Fields
from engine.serving.gateway.route_table import OF_CHOICES, SAMPLES, Kind
from engine.settings.releases import SEGMENT_NAME

# A client has this many seconds to send its body.
BODY_S = 60.0
# Bytes of a body beside its text, and those of a token at most: most have four, a run of spaces many.
OTHER_BYTES, TOKEN_BYTES = 256 << 10, 64
# Lists and objects of a body; a text may have brackets, too.
MOST_BRACKETS = 1 << 16
# Values of a body beside those of a context full of token ids.
OTHER_VALUES = 1 << 16
# Most completions of one request, n for each of its prompts; by a key that scores or trains.
INFER_SAMPLES, MOST_SAMPLES = 64, 1 << 14
# A session's name is hashed, and hashes of the last ones are kept.
MOST_SESSION = 512
# Log-probabilities of a request's prompts and of its completions but one, with those of alternatives. Each is
# an object of vLLM's and of its answer: 30 us on the event loop.
MOST_LOGPROBS = 1 << 17
LOGPROBS = frozenset({"logprobs", "top_logprobs", "prompt_logprobs"})
# The fields that say how many tokens each completion may have.
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
# The roles that allow a purpose: one is enough.
PURPOSES = {
    "user": ("infer",),
    "score": ("score",),
    "probe": ("score",),
    "rollout": ("score", "train"),
    "shadow": ("score",),
}


async def read(call: Call) -> None:
    """Read and check the body, and take from it what the later stages need.

    Raises `Refused` that names the field, or what is too large; `Forbidden` for a purpose without its role.
    """
    state, endpoint, key = call.state, call.endpoint, call.key
    assert key is not None
    # Who scores and trains sends batches.
    is_batch = key.may("score", "train")
    context = None if is_batch else state.context
    most = endpoint.most_body if context is None else min(endpoint.most_body, most_bytes(context))
    raw = b"" if call.scope["method"] == "GET" else await read_body(call.receive, most)
    call.body_bytes = len(raw)
    if endpoint.kind is not Kind.GENERATE:
        call.answer = AnswerReader(endpoint.path)
        # Nothing of it is read.
        call.answer.plain = b""
    if endpoint.fields is None:
        # An endpoint of ours checks its body itself.
        call.raw = raw
        return
    if state.copied is not None:
        call.raw = raw
    call.body = body = parse_within(raw, context)
    check_fields(body, endpoint.fields)
    unit = end_user_of(body) or session_of(call.headers)
    drop_fields(body)
    if endpoint.kind is Kind.TOKENIZE:
        return
    size = size_of(body, endpoint.tokens)
    samples = MOST_SAMPLES if is_batch else INFER_SAMPLES
    if size.samples > samples:
        said = f"The request asks for {size.samples} completions, n for each prompt; the most is {samples}."
        raise Refused(400, said, "invalid_value", "n")
    if context is not None:
        refuse_many_logprobs(body, min(len(raw), context * size.prompts), size, context)
    call.purpose = purpose_of(endpoint.path, call.headers, key)
    call.segment, call.unit, call.size = segment_of(call.headers), unit, size
    call.model = body.get("model", "")
    if not call.model:
        raise Refused(400, "The request names no model.", "invalid_value", "model")
    call.constraints = constraints_of(body, key) if FIELDS & body.keys() else []
    call.answer = AnswerReader(endpoint.path, body.get("stream") is True, wants_json(body), size.samples)
    # Nothing has been computed yet.
    call.answer.used = (0, 0)
    options = body.get("stream_options") or {}
    call.wants_usage = endpoint.path not in OF_CHOICES or bool(options.get("include_usage"))
    call.started = time.perf_counter()


def most_bytes(context: int) -> int:
    """Return the bytes of the largest body whose prompt may fit a context of so many tokens."""
    return OTHER_BYTES + TOKEN_BYTES * context


async def read_body(receive: Receive, most: int = MAX_BODY) -> bytes:
    """Return the whole request body.

    Raises `Refused`: 413 over `most` bytes, 408 when it takes too long, 400 when the client leaves first.
    """
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refused(400, "The client disconnected before it had sent the whole request.")
                chunks.append(message.get("body", b""))
                size += len(chunks[-1])
                if size > most:
                    raise Refused(413, f"The request body is larger than the limit of {most} bytes.")
                if not message.get("more_body"):
                    return b"".join(chunks)
    except TimeoutError:
        raise Refused(408, f"The request body did not arrive within {BODY_S:g} s.") from None


def parse_within(raw: bytes, context: int | None) -> dict[str, Any]:
    """Return a body as a JSON object.

    `context`: the tokens that its prompts may have; None: as many as its bytes allow. Raises `Refused`: 413
    where it would take too long to parse, 400 for what is no JSON object or is nested too deeply.
    """
    brackets = raw.count(b"[") + raw.count(b"{")
    if brackets > MOST_BRACKETS:
        raise Refused(413, f"The request body has {brackets} brackets; the most is {MOST_BRACKETS}.")
    if context is not None and (values := raw.count(b",") + brackets) > OTHER_VALUES + context:
        raise Refused(413, f"The request body has {values} values; the most is {OTHER_VALUES + context}.")
    body = parse(raw)
    if brackets > MOST_DEPTH and is_deeper(body, MOST_DEPTH):
        raise Refused(400, f"The request body is nested deeper than {MOST_DEPTH} lists and objects.")
    return body


def parse(raw: bytes) -> dict[str, Any]:
    """Return a request body as a JSON object. Raises `Refused` (400) for anything else."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Refused(400, f"The request body is not valid JSON: {error}.") from None
    if not isinstance(body, dict):
        raise Refused(400, f"The request body must be a JSON object, not a {type(body).__name__}.")
    return body


def session_of(headers: Mapping[str, str]) -> str | None:
    """Return the session that a request names, or None. Raises `Refused` (400) for a long one."""
    session = headers.get("x-session-id")
    if session is not None and len(session) > MOST_SESSION:
        raise Refused(400, f"x-session-id must have at most {MOST_SESSION} characters.")
    return session


def purpose_of(path: str, headers: Mapping[str, str], key: Key) -> str:
    """Return the request's purpose. Raises `Refused` for an unknown one, `Forbidden` without its role.

    Without the header it is `rollout` for samples, else `user`.
    """
    purpose = headers.get("x-graftwork-purpose", "rollout" if path == SAMPLES else "user")
    roles = PURPOSES.get(purpose)
    if roles is None:
        known = ", ".join(sorted(PURPOSES))
        raise Refused(400, f"x-graftwork-purpose must be one of {known}, not {purpose[:100]!r}.")
    require(f"x-graftwork-purpose {purpose!r}", roles, key)
    return purpose


def segment_of(headers: Mapping[str, str]) -> str | None:
    """Return the segment that a request names, or None. Raises `Refused` for an invalid one."""
    segment = headers.get("x-graftwork-segment")
    if segment is not None and not SEGMENT_NAME.fullmatch(segment):
        raise Refused(
            400,
            f"x-graftwork-segment must be 1 to 64 letters, digits, '.', '-' or '_', not {segment[:64]!r}.",
        )
    return segment


def check_fields(body: dict[str, Any], fields: Fields) -> None:
    """Refuse unknown fields and values out of bounds; remove fields without a value.

    Raises `Refused` (400) that names the field.
    """
    for name in [name for name, value in body.items() if value is None]:
        del body[name]
    for name in [name for name, value in ROUTERS_OWN.items() if body.get(name) is value]:
        del body[name]
    for name, value in body.items():
        check = fields.get(name) or DROPPED.get(name)
        if check is None:
            raise Refused(
                400, f"The field {name[:100]!r} is not served here.", "unsupported_parameter", name[:100]
            )
        fault = check(value)
        if fault:
            raise Refused(400, f"{name!r} {fault}.", "invalid_value", name)


def drop_fields(body: dict[str, Any]) -> None:
    """Remove what vLLM does not get."""
    for name in DROPPED.keys() & body.keys():
        del body[name]


def end_user_of(body: Mapping[str, Any]) -> str | None:
    """Return whom a checked request is for, in the field that its API has for that; None: it does not say."""
    metadata = body.get("metadata")
    by_metadata = metadata.get("user_id") if isinstance(metadata, dict) else None
    return body.get("user") or body.get("safety_identifier") or by_metadata


def refuse_many_logprobs(body: Mapping[str, Any], prompt_tokens: int, size: Size, context: int) -> None:
    """Raise `Refused` (400) for too many log-probabilities of its prompts, and of further completions.

    Those of one completion come with its tokens, which limits and budgets bound.
    """
    if LOGPROBS.isdisjoint(body):
        return
    of_output = _most(body, "logprobs", "top_logprobs")
    of_prompt = max(_most(body, "prompt_logprobs"), of_output if body.get("echo") else 0)
    each = context if size.most_tokens is None else min(size.most_tokens, context)
    copies = size.samples // size.prompts if body.get("echo") else 1
    logprobs = prompt_tokens * of_prompt * copies + (size.samples - 1) * each * of_output
    if logprobs > MOST_LOGPROBS:
        said = (
            f"The request may ask for {logprobs} log-probabilities of its prompts and further completions; "
            f"the most is {MOST_LOGPROBS}. Ask for fewer, or in several requests."
        )
        raise Refused(
            400, said, "invalid_value", "prompt_logprobs" if "prompt_logprobs" in body else "logprobs"
        )


def _most(body: Mapping[str, Any], *names: str) -> int:
    """Return the largest integer among these fields; true and false are none."""
    return max((value for name in names if type(value := body.get(name)) is int), default=0)


def size_of(body: Mapping[str, Any], tokens_default: int | None) -> Size:
    """Return what a request asks for. `tokens_default` counts where it names no number of tokens."""
    prompt = body.get("prompts", body.get("prompt"))
    prompts = 1
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompts = len(prompt)
    # True and false are no numbers.
    given = [value for name in LENGTHS if type(value := body.get(name)) is int]
    n = body.get("n")
    samples = prompts * n if type(n) is int else prompts
    return Size(prompts, samples, max(given, default=tokens_default))
