"""What vLLM's verification of drafted tokens (speculative decoding) needs on CPU; see the plugin.

Shape suffixes: _B requests, _D drafted tokens of all requests, one after another.
"""

import torch
from torch import Tensor


def expand(
    values_B: Tensor, ends_B: Tensor, tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Tensor:
    """Give each of a request's drafted tokens the request's value, as (D,).

    `ends_B` counts drafted tokens up to a request's last one; a value of `replace_from` becomes `replace_to`.
    """
    counts_B = ends_B.diff(prepend=ends_B.new_zeros(1))
    replaced_B = torch.where(values_B == replace_from, replace_to, values_B).to(values_B.dtype)
    return replaced_B.repeat_interleave(counts_B.long(), output_size=tokens)
