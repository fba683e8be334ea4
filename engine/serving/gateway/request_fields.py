"""The fields that each endpoint takes, with bounds. Any other field is refused by its name.

vLLM checks types and the values of sampling settings. Here is what decides how much a request may cost,
which other tenants it may touch, and what of vLLM is open at all. Messages have text alone: what else a
message may hold makes vLLM fetch a URL or decode a file. A part without `type` is what its keys say to vLLM,
so a part may have the keys of its own kind and no others.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from engine.serving.gateway.constraints import own_field
from engine.serving.gateway.request_depth import MOST_DEPTH

# Says what is wrong with a value, or None.
Check = Callable[[Any], str | None]
Fields = Mapping[str, Check]
# Most tokens that a field may name: vLLM refuses what the base's context does not hold.
MOST_TOKENS = 1 << 24
MOST_MESSAGES = 4096
BRACKETS = re.compile(r"[\[\]{}]")
# The kinds of parts, and their keys.
PARTS = {
    "text": {"text", "cache_control", "citations"},
    "input_text": {"text"},
    "output_text": {"text", "annotations", "logprobs"},
    "reasoning_text": {"text"},
    "refusal": {"refusal"},
    "tool_use": {"id", "name", "input", "cache_control"},
    "tool_result": {"tool_use_id", "content", "is_error", "cache_control"},
    "thinking": {"thinking", "signature"},
    "redacted_thinking": {"data"},
}
# What a list of messages may hold in the responses API; elsewhere a message has no type.
ITEMS = (
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "reasoning",
)


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
        texts = [value] if isinstance(value, str) else value
        is_list = isinstance(texts, list) and len(texts) <= most
        if is_list and all(isinstance(one, str) for one in texts) and sum(map(len, texts)) <= 4096:
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


def plain_text(messages: Any) -> str | None:
    """Say why messages are not text, tool calls and tool results alone; None when they are."""
    if isinstance(messages, str):
        return None
    if not isinstance(messages, list) or len(messages) > MOST_MESSAGES:
        return f"must be a list of at most {MOST_MESSAGES} messages"
    for message in messages:
        if not isinstance(message, dict):
            return "must be a list of messages, which are objects"
        kind = message.get("type", "message")
        if kind not in ITEMS:
            return _of_kind(kind)
        for name in ("content", "output"):
            if fault := text_parts(message.get(name)):
                return fault
        if any(_is_deep(text) for text in _arguments(message)):
            return f"has arguments of a tool that are nested deeper than {MOST_DEPTH} lists and objects"
    return None


def _arguments(message: dict[str, Any]) -> Iterator[str]:
    """Yield the texts of a message that vLLM parses as JSON: what tools were called with."""
    calls = message.get("tool_calls")
    calls = calls if isinstance(calls, list) else []
    functions = [call.get("function") for call in calls if isinstance(call, dict)]
    for one in (message, message.get("function_call"), *functions):
        if isinstance(one, dict) and isinstance(text := one.get("arguments"), str):
            yield text


def _is_deep(text: str) -> bool:
    """Return whether a text has enough brackets in a row of openings to be nested too deeply.

    Brackets in the JSON's own texts count as well, so that a few deep ones of code may be refused.
    """
    if text.count("[") + text.count("{") <= MOST_DEPTH:
        return False
    depth = 0
    for bracket in BRACKETS.findall(text):
        depth = depth + 1 if bracket in "[{" else max(0, depth - 1)
        if depth > MOST_DEPTH:
            return True
    return False


ROLES = ("user", "assistant", "system", "developer")
# Fields of an item beside its type, each a text.
ITEM_TEXTS = {
    "function_call": {"call_id", "name", "arguments"},
    "function_call_output": {"call_id", "output"},
    "custom_tool_call": {"call_id", "name", "input"},
    "custom_tool_call_output": {"call_id", "output"},
}


def response_items(items: Any) -> str | None:
    """Say why the input of the responses API is not a text, or a list of items that are whole; else None.

    vLLM tries each of some twenty kinds for an item that fits none: 4 ms on its event loop, and 1 MB.
    """
    if fault := plain_text(items):
        return fault
    for item in items if isinstance(items, list) else ():
        kind = item.get("type", "message")
        if kind == "message":
            if not _is_choice(item.get("role"), ROLES) or not _has_texts(item.get("content")):
                return "has a message without a role and a text"
        elif kind in ITEM_TEXTS and not all(isinstance(item.get(name), str) for name in ITEM_TEXTS[kind]):
            return f"has an item of type {kind!r} without {', '.join(sorted(ITEM_TEXTS[kind]))}"
        elif kind == "reasoning" and not (isinstance(item.get("summary", []), list) and "id" in item):
            return "has an item of type 'reasoning' without id and summary"
        if any(not isinstance(item.get(name, ""), str) for name in ("id", "status", "phase")):
            return "has an item whose id or status is no text"
    return None


def _is_choice(value: Any, choices: tuple[str, ...]) -> bool:
    return isinstance(value, str) and value in choices


def _has_texts(content: Any) -> bool:
    if isinstance(content, list):
        return all(
            isinstance(part, dict)
            and isinstance(part.get("text", part.get("refusal")), str)
            and _is_choice(part.get("type"), ("input_text", "output_text", "refusal"))
            and not part.get("annotations")
            and not part.get("logprobs")
            for part in content
        )
    return isinstance(content, str)


def text_parts(content: Any, is_result: bool = False) -> str | None:
    """Say why the content of a message, or of a tool's result in it, is not text; None when it is."""
    if content is None or isinstance(content, str):
        return None
    if not isinstance(content, list):
        return "has content that is neither a text nor a list of parts"
    for part in content:
        if isinstance(part, str):
            continue
        if not isinstance(part, dict):
            return "has a part that is neither a text nor an object"
        kind = part.get("type", "text")
        keys = PARTS.get(kind) if isinstance(kind, str) else None
        if keys is None or (is_result and kind == "tool_result"):
            return _of_kind(kind)
        if unknown := part.keys() - keys - {"type"}:
            return f"has a part of type {kind!r} with {min(unknown)[:40]!r}; only text is served"
        if kind == "tool_result" and (fault := text_parts(part.get("content"), is_result=True)):
            return fault
    return None


def _of_kind(kind: Any) -> str:
    return f"has a part of type {str(kind)[:40]!r}; only text is served"


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
SAMPLES: Fields = {
    **{name: SAMPLING[name] for name in ("model", "n", "max_tokens")},
    **named(
        anything, "prompt", "prompts", "temperature", "top_k", "top_p", "seed", "stop", "prompt_logprobs",
        "topk_prompt_logprobs", "texts", "routed_experts",
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
