"""vLLM's own server in the environment and with the process settings of ours, so that only LoRA differs.

    python tests/helpers/stock_server.py ARGUMENTS_OF_VLLM

It has no plugin of ours. Its worker is in the engine core's process, its OpenMP threads wait passively, its
memory lies on huge pages, and it compiles nothing.
"""

import sys
from collections.abc import Sequence

from engine.serving.server import executor_arguments, serve, set_environment
from engine.settings.params import Params


def serve_like_ours(arguments: Sequence[str]) -> None:
    """Run vLLM's server on a CPU with these arguments; what its environment has already goes before ours."""
    params = Params()
    set_environment(params)
    serve([*arguments, *executor_arguments(params.engine, None)])


if __name__ == "__main__":
    serve_like_ours(sys.argv[1:])
