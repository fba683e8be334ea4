"""What our requests say to the patched vLLM, by keys of their `vllm_xargs`."""

# Return the experts of the request's tokens; tell the frontend of it once, at its end.
ROUTED_EXPERTS, COALESCED = "routed_experts", "coalesced"
