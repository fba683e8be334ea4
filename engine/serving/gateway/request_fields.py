"""The fields that each endpoint takes, with bounds. Any other field is refused by its name.

vLLM checks types and the values of sampling settings. Here is what decides how much a request may cost,
which other tenants it may touch, and what of vLLM is open at all.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.serving.gateway.asgi import Refused
from engine.serving.gateway.constraints import own_field
from engine.serving.gateway.message_text import plain_text, response_items, text_parts

# Says what is wrong with a value, or None.
Check = Callable[[Any], str | None]
Fields = Mapping[str, Check]
# Most tokens that a field may name: vLLM refuses what the base's context does not hold.
MOST_TOKENS = 1 << 24
# Log-probabilities of a request's prompts and of its completions but one, with those of alternatives. Each is
# an object of vLLM's and of its answer: 30 us on the event loop.
MOST_LOGPROBS = 1 << 17


def anything(_value: Any) -> None:
    """Accept every value; vLLM checks it."""
    return


def whole(least: int, most: int) -> Check:
    """Return a check for an integer from `least` to `most`."""

    def check(value: Any) -> str | None:
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return None
        return f"must be an integer from {least} to {most}"

    return check


def words(most: int) -> Check:
    """Return a check for a string of at most `most` characters."""

    def check(value: Any) -> str | None:
        is_short = isinstance(value, str) and len(value) <= most
        return None if is_short else f"must be a string of at most {most} characters"

    return check


def short(most: int) -> Check:
    """Return a check for a string, a list or an object of at most `most` characters or items."""

    def check(value: Any) -> str | None:
        if isinstance(value, str | list | dict) and len(value) <= most:
            return None
        return f"must have at most {most} characters or items"

    return check


def strings(most: int) -> Check:
    """Return a check for a string, or a list of at most `most`; of at most 4,096 characters together."""

    def check(value: Any) -> str | None:
        found = [value] if isinstance(value, str) else value
        is_list = isinstance(found, list) and len(found) <= most
        if is_list and all(isinstance(one, str) for one in found) and sum(map(len, found)) <= 4096:
            return None
        return f"must be a string, or at most {most} of them, with 4096 characters together"

    return check


def flag(value: Any) -> str | None:
    """Check for true or false: vLLM takes `"true"` and 1 for it as well, and the gateway reads the field."""
    return None if isinstance(value, bool) else "must be true or false"


def stateless(value: Any) -> str | None:
    """Refuse a stateful feature of the responses API, by a value that asks for it."""
    return "asks for stored state, which is not served; send the whole conversation" if value else None


def function_tools(tools: Any) -> str | None:
    """Check that tools are functions of the client, at most 128: the server runs none."""
    if not isinstance(tools, list) or len(tools) > 128:
        return "must be a list of at most 128 tools"
    for tool in tools:
        kind = tool.get("type", "function") if isinstance(tool, dict) else None
        if kind not in ("function", "custom"):
            return f"has a tool of type {str(kind)[:40]!r}; only functions are served"
    return None


def stream_options(value: Any) -> str | None:
    """Check that only usage is asked for."""
    known = {"include_usage", "continuous_usage_stats"}
    is_known = isinstance(value, dict) and value.keys() <= known
    return None if is_known else f"takes {' and '.join(sorted(known))} alone"


def named(check: Check, *names: str) -> dict[str, Check]:
    """Return the same check for several fields."""
    return dict.fromkeys(names, check)


SAMPLING: Fields = {
    "model": words(1024),
    "n": whole(1, 1 << 14),
    "stream_options": stream_options,
    "user": words(512),
    "min_tokens": whole(0, MOST_TOKENS),
    "stream": flag,
    "truncate_prompt_tokens": whole(-1, MOST_TOKENS),
    "prompt_logprobs": whole(0, 20),
    "max_tokens": whole(1, MOST_TOKENS),
    "structured_outputs": own_field,
    "stop": strings(16),
    "bad_words": strings(128),
    **named(short(128), "stop_token_ids", "logprob_token_ids"),
    **named(short(4096), "logit_bias", "allowed_token_ids"),
    **named(
        anything, "frequency_penalty", "presence_penalty", "repetition_penalty", "seed",
        "temperature", "top_p", "top_k", "min_p", "response_format",
        "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens",
        "truncation_side", "add_special_tokens", "return_token_ids", "return_tokens_as_token_ids",
    ),
}  # fmt: skip
CHATTING: Fields = {
    "messages": plain_text,
    "tools": function_tools,
    "chat_template_kwargs": short(16),
    **named(
        anything, "tool_choice", "parallel_tool_calls", "add_generation_prompt", "continue_final_message",
    ),
}  # fmt: skip
CHAT: Fields = {
    **SAMPLING,
    **CHATTING,
    "top_logprobs": whole(0, 20),
    "max_completion_tokens": whole(1, MOST_TOKENS),
    "thinking_token_budget": whole(0, MOST_TOKENS),
    **named(flag, "logprobs", "echo"),
    **named(anything, "reasoning_effort", "include_reasoning"),
}
COMPLETION: Fields = {
    **SAMPLING,
    # None is left over for a suite that scores its prompt alone.
    "max_tokens": whole(0, MOST_TOKENS),
    "logprobs": whole(0, 20),
    "echo": flag,
    **named(anything, "prompt", "suffix"),
}
RESPONSES: Fields = {
    **{name: SAMPLING[name] for name in ("model", "user", "stop_token_ids", "logit_bias")},
    **{name: SAMPLING[name] for name in ("stop", "stream", "structured_outputs")},
    "input": response_items,
    "tools": function_tools,
    "chat_template_kwargs": short(16),
    "include": short(8),
    "top_logprobs": whole(0, 20),
    "max_output_tokens": whole(1, MOST_TOKENS),
    "max_tool_calls": whole(0, 128),
    **named(stateless, "background", "conversation", "previous_response_id", "prompt", "store"),
    **named(
        anything, "frequency_penalty", "ignore_eos", "include_reasoning", "include_stop_str_in_output",
        "instructions", "min_p", "parallel_tool_calls", "presence_penalty", "reasoning",
        "repetition_penalty", "seed", "skip_special_tokens", "temperature",
        "text", "tool_choice", "top_k", "top_p", "truncation",
    ),
}  # fmt: skip
MESSAGES: Fields = {
    "model": SAMPLING["model"],
    "messages": plain_text,
    "system": text_parts,
    "tools": function_tools,
    "max_tokens": SAMPLING["max_tokens"],
    "stream": flag,
    "stop_sequences": strings(16),
    "chat_template_kwargs": short(16),
    **named(
        anything, "output_config", "temperature", "thinking", "tool_choice", "top_k", "top_p",
    ),
}  # fmt: skip
COUNTED: Fields = {name: MESSAGES[name] for name in ("model", "messages", "tools", "system", "tool_choice")}
TOKENIZE: Fields = {
    **CHATTING,
    "model": SAMPLING["model"],
    **named(anything, "prompt", "add_special_tokens", "return_token_strs"),
}
DETOKENIZE: Fields = {"model": SAMPLING["model"], "tokens": anything}
ROLLOUTS: Fields = {
    **{name: SAMPLING[name] for name in ("model", "n", "max_tokens")},
    **named(anything, "prompts", "temperature", "seed", "routed_experts"),
}
SAMPLES: Fields = {
    **{name: SAMPLING[name] for name in ("model", "n", "max_tokens")},
    **named(
        anything, "prompt", "prompts", "temperature", "top_k", "top_p", "seed", "stop", "prompt_logprobs",
        "topk_prompt_logprobs",
    ),
}  # fmt: skip


def names_user(metadata: Any) -> str | None:
    """Check the `user_id` of Anthropic's `metadata`; the rest of it goes no further."""
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    fault = None if user is None else words(512)(user)
    return fault and f"has a 'user_id' that {fault}"


# Fields of OpenAI's and Anthropic's clients that go no further: two name the end user.
DROPPED: Fields = {
    "metadata": names_user,
    "safety_identifier": words(512),
    **named(anything, "prompt_cache_key", "service_tier", "store", "verbosity"),
}

# What vLLM's router adds to every request, with the values that change nothing; they go no further either.
ROUTERS_OWN = {
    "no_stop_trim": False, "return_hidden_states": False, "separate_reasoning": True,
    "stream_reasoning": True,
}  # fmt: skip


@dataclass(frozen=True)
class Size:
    """How much a request asks for: prompts, completions of all prompts, and tokens of each completion.

    `most_tokens` is None where the request leaves it to the base's context.
    """

    prompts: int
    samples: int
    most_tokens: int | None


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
    of_output = _most(body, "logprobs", "top_logprobs")
    of_prompt = max(_most(body, "prompt_logprobs"), of_output if body.get("echo") else 0)
    each = context if size.most_tokens is None else min(size.most_tokens, context)
    copies = size.samples // size.prompts if body.get("echo") else 1
    found = prompt_tokens * of_prompt * copies + (size.samples - 1) * each * of_output
    if found > MOST_LOGPROBS:
        said = (
            f"The request may ask for {found} log-probabilities of its prompts and further completions; the "
            f"most is {MOST_LOGPROBS}. Ask for fewer, or in several requests."
        )
        raise Refused(
            400, said, "invalid_value", "prompt_logprobs" if "prompt_logprobs" in body else "logprobs"
        )


def _most(body: Mapping[str, Any], *names: str) -> int:
    return max(_integers(body.get(name) for name in names), default=0)


def size_of(body: Mapping[str, Any], tokens_default: int | None) -> Size:
    """Return what a request asks for. `tokens_default` counts where it names no number of tokens."""
    prompt = body.get("prompts", body.get("prompt"))
    prompts = 1
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompts = len(prompt)
    given = [body.get(name) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")]
    tokens = max(_integers(given), default=tokens_default)
    n = next(iter(_integers([body.get("n")])), 1)
    return Size(prompts, prompts * n, tokens)


def _integers(values: Iterable[Any]) -> list[int]:
    return [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
