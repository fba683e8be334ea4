"""Everything that runs inside vLLM's server (gateway, residency, worker, plugin), and its start."""

import logging

# On a CPU vLLM warns at import that Triton has no backend for it: no released one has, so this says nothing.
# Every module of ours that imports vLLM lies in this package.
NO_TRITON = "Triton is installed, but doesn't include CPU backend."
logging.getLogger("vllm.triton_utils.importing").addFilter(
    lambda record: not str(record.msg).startswith(NO_TRITON)
)
