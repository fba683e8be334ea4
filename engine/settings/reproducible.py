"""Equal bits on a CPU: how a process asks MKL, torch's BLAS, for them.

MKL picks a kernel by the number of rows, so a row's last bits depend on how many rows stand beside it. In
its strict mode they do not, on Intel CPUs with AVX2 or AVX-512: docs/reproduce.md says what holds elsewhere.
MKL reads the variable once, at its first product, so every process of ours sets it before torch is imported.
"""

import sys
from collections.abc import Mapping

from engine.errors import ConfigError

VARIABLE = "MKL_CBWR"
VALUE = "AUTO,STRICT"
# `AVX2,STRICT` gives a machine with AVX-512 the bits of one without it.
STRICT_VALUES = (VALUE, "AVX2,STRICT", "AVX512,STRICT")


def equal_bits(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable for a process with these variables: a strict value of the user's own stays.

    Raises `ConfigError` for any other value, which would break equal bits without a word.
    """
    given = environ.get(VARIABLE)
    if given and given not in STRICT_VALUES:
        raise ConfigError(
            f"{VARIABLE} is {given!r} in the environment. With it a row's last bits depend on how many rows "
            "are computed beside it, so neither a score nor a training step can be repeated bit for bit. "
            f"Unset it, or set it to {', '.join(STRICT_VALUES[:-1])} or {STRICT_VALUES[-1]}."
        )
    assert given or "torch" not in sys.modules, (
        f"torch was imported before {VARIABLE} was set. Start the process with {VARIABLE}={VALUE} in its "
        "environment, as `graftwork` does."
    )
    return {VARIABLE: given or VALUE}
