"""What the trainer takes: bytes of a session and of all, lengths and tokens of data."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from engine.config import Params
from engine.errors import ConfigError
from engine.training.adapter import Site
from engine.training.lora import Example, ResidentBase

# Of what is free once the base is loaded: the rest is for activations, and for the engine beside.
FREE_SHARE = 0.25
# Where Linux says what a container may use and uses (cgroup v2).
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Limits:
    """The longest sequence, the size of the vocabulary, and the bytes for all sessions in memory."""

    tokens: int
    vocabulary: int
    session_bytes: int

    @staticmethod
    def of(params: Params, base: ResidentBase, session_bytes: int) -> "Limits":
        """Return the limits of a base: sequences that memory is planned for and its positions reach."""
        config = base.model.config
        planned = max(params.engine.max_model_len, params.trainer.microbatch_tokens)
        return Limits(min(planned, config.max_position_embeddings), config.vocab_size, session_bytes)

    def check(self, data: Sequence[Example]) -> None:
        """Raise `ConfigError` that names the first datum that is too long or holds an unknown token."""
        if not data:
            raise ConfigError("There is no data in this request; send at least one datum.")
        for i, example in enumerate(data):
            tokens = example.row.tokens
            if len(tokens) > self.tokens:
                raise ConfigError(
                    f"Datum {i} has {len(tokens)} tokens; this trainer takes {self.tokens}. Cut it, or raise "
                    "engine.max_model_len or trainer.microbatch_tokens where the base allows it."
                )
            if not 0 <= min(tokens) <= max(tokens) < self.vocabulary:
                wrong = next(token for token in tokens if not 0 <= token < self.vocabulary)
                raise ConfigError(
                    f"Datum {i} holds the token {wrong}; the base knows 0 to {self.vocabulary - 1}. "
                    "Was it made with another tokenizer?"
                )


def bytes_of(sites: Iterable[Site], rank: int) -> int:
    """Return the memory of an adapter that trains: four float32 of each number of its factors.

    The factor itself, its gradient, and AdamW's two moments (arXiv 1711.05101, algorithm 2).
    """
    return sum(rank * (site.inputs + site.outputs) * max(1, site.experts) for site in sites) * 4 * 4


def free_bytes() -> int:
    """Return the memory that this process may still take, by the machine and by its container."""
    free = int(psutil.virtual_memory().available)
    limit = CGROUP / "memory.max"
    if not limit.is_file() or (allowed := limit.read_text().strip()) == "max":
        return free
    return min(free, int(allowed) - int((CGROUP / "memory.current").read_text()))
