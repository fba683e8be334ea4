"""Names of the bases that are made here."""

# Built by a recipe of engine/base/toys; the last two have random weights and are for benchmarks.
TOYS = ("tiny-dense", "tiny-moe", "tiny-mla", "tiny-dsa", "many-moe", "wide-moe")
# Converted from the GGUF file that a Python package ships.
PACKAGED = ("smollm2-135m",)
# What a command's `--base` takes.
TRAINABLE = (*TOYS[:4], *PACKAGED)
