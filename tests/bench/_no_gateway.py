"""Our engine without the gateway in front of vLLM's routes; otherwise the same server and environment.

python tests/bench/_no_gateway.py --params FILE
"""

from collections.abc import Sequence
from typing import Any

from engine.serving import server


def without_gateway(*given: Any) -> list[str]:
    arguments = made(*given)
    at = arguments.index("--middleware")
    return arguments[:at] + arguments[at + 2 :]


def main(_arguments: Sequence[str] = ()) -> None:
    server.server_arguments = without_gateway
    server.main()


made = server.server_arguments

if __name__ == "__main__":
    main()
