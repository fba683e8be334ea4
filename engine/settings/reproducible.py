"""Bit-identical results on a CPU: the environment variable that puts MKL, torch's BLAS, into strict mode.

MKL picks a kernel by the number of rows, so the last bits of a row depend on the size of its batch. In strict
mode they do not, on Intel CPUs with AVX2 or AVX-512; docs/reproduce.md covers other CPUs. MKL reads the
variable at its first product, so every process of Graftwork sets it before torch is imported.
"""

import sys
from collections.abc import Mapping

from engine.errors import ConfigError

VARIABLE = "MKL_CBWR"
VALUE = "AUTO,STRICT"
# `AVX2,STRICT` gives a machine with AVX-512 the bits of one without it.
STRICT_VALUES = (VALUE, "AVX2,STRICT", "AVX512,STRICT")


def equal_bits(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable to set for a process with the environment `environ`.

    A strict value that is already set is kept. Raises `ConfigError` for any other value, with which results
    would differ silently.
    """
    given = environ.get(VARIABLE)
    if given and given not in STRICT_VALUES:
        raise ConfigError(
            f"{VARIABLE} is {given!r} in the environment. With it the last bits of a row depend on the "
            "size of its batch, so neither a score nor a training step is reproducible bit for bit. "
            f"Unset it, or set it to {', '.join(STRICT_VALUES[:-1])} or {STRICT_VALUES[-1]}."
        )
    assert given or "torch" not in sys.modules, (
        f"torch was imported before {VARIABLE} was set. Start the process with {VARIABLE}={VALUE} in its "
        "environment, as `graftwork` does."
    )
    return {VARIABLE: given or VALUE}
