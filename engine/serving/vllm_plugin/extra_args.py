"""Keys of `vllm_xargs` by which requests use our patches of vLLM."""

# Return the routed experts of the request's tokens; send its output to the frontend once, at its end.
ROUTED_EXPERTS, COALESCED = "routed_experts", "coalesced"
