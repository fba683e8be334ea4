"""The head: log-probabilities, entropies and gradients of plain autograd, whatever the size of its chunks."""

import pytest
import torch

from engine.training.model import linear as head
from engine.training.model.linear import ChosenLogprobs

TOKENS, HIDDEN, VOCABULARY = 23, 16, 300


def made(dtype: torch.dtype, bias: bool) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    # Logits of up to 4,000 for one token: their exponentials overflow unless the largest is subtracted.
    hidden[5] *= 300
    chosen = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    factor = torch.randn(TOKENS, generator=generator)
    add = torch.randn(VOCABULARY, generator=generator).to(dtype) if bias else None
    return hidden.to(dtype).requires_grad_(), chosen, weight.to(dtype), add, factor


@pytest.mark.parametrize("chunk", [1, 4, 7, 23, 1000])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradient_are_those_of_autograd(chunk, bias, monkeypatch):
    """In float64 by the definition; float32 sums of 300 terms differ by 1e-6 of the largest."""
    monkeypatch.setattr(head, "HEAD_TOKENS", chunk)
    hidden, chosen, weight, add, factor = made(torch.float32, bias)
    logprob, entropy = ChosenLogprobs.apply(hidden, chosen, weight, add)
    (gradient,) = torch.autograd.grad(logprob, hidden, factor)
    wide = hidden.detach().double().requires_grad_()
    logits = wide @ weight.double().T + (0 if add is None else add.double())
    every = logits.log_softmax(1)
    picked = every[torch.arange(TOKENS), chosen]
    (wanted,) = torch.autograd.grad(picked, wide, factor.double())
    scale = logits.detach().abs().amax(1)
    assert ((logprob - picked).abs() < 1e-6 * scale).all()
    assert ((entropy - torch.special.entr(every.exp()).sum(1)).abs() < 2e-6 * scale).all()
    assert not entropy.requires_grad
    torch.testing.assert_close(gradient, wanted.float(), rtol=0, atol=2e-5)
    assert wanted.abs().amax(1).min() > 1e-2


def test_in_bfloat16_the_gradient_is_that_of_rounded_logits(monkeypatch):
    monkeypatch.setattr(head, "HEAD_TOKENS", 7)
    hidden, chosen, weight, _, factor = made(torch.bfloat16, False)
    logprob, _ = ChosenLogprobs.apply(hidden, chosen, weight, None)
    (gradient,) = torch.autograd.grad(logprob, hidden, factor)
    other = (hidden @ weight.T).float().log_softmax(1)[torch.arange(TOKENS), chosen]
    (wanted,) = torch.autograd.grad(other, hidden, factor)
    assert gradient.dtype == torch.bfloat16
    assert torch.equal(logprob, other) or (logprob - other).abs().max() < 1e-3
    # Two roundings to 8 bits on either side.
    assert ((gradient - wanted).abs() <= 2**-6 * wanted.abs().amax(1, keepdim=True)).all()


def test_chunks_are_of_nearly_equal_size(monkeypatch):
    """A chunk of one or two rows would be rounded by another routine than the others."""
    sizes = []
    linear = head.linear
    monkeypatch.setattr(head, "linear", lambda *given: sizes.append(len(given[0])) or linear(*given))
    monkeypatch.setattr(head, "HEAD_TOKENS", 11)
    ChosenLogprobs.apply(*made(torch.float32, False)[:4])
    assert sizes == [8, 8, 7]


@pytest.mark.parametrize("learned", [True, False])
def test_only_a_row_a_token_is_kept(learned, monkeypatch):
    monkeypatch.setattr(head, "HEAD_TOKENS", 7)
    hidden, chosen, weight, *_ = made(torch.float32, False)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        ChosenLogprobs.apply(hidden if learned else hidden.detach(), chosen, weight, None)
    assert [tuple(one.shape) for one in kept] == [(TOKENS, HIDDEN)] * learned
