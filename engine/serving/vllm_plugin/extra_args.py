"""What a request tells our patches of vLLM."""

from contextvars import ContextVar

# Keys of `vllm_xargs`: return the routed experts of the request's tokens; send its output to the frontend
# once, at its end.
ROUTED_EXPERTS, COALESCED = "routed_experts", "coalesced"
# The `model` of a request that the base answers, for its answer to carry.
ASKED: ContextVar[str | None] = ContextVar("asked", default=None)
