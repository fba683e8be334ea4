"""A batch of adapters has the digests, layout and bytes of each one alone; what is unfit alone is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.adapters import packed, revision
from engine.adapters.revision import validate
from engine.base.families import BaseShapes
from engine.errors import AdapterError
from engine.publishing.adapter_batches import BatchForm, flatten, form_of
from tests.helpers import made_adapters

BASE = "ba" * 32
DENSE = made_adapters.shapes("qwen3")


def adapter(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return made_adapters.canonical(DENSE, seed=seed, dtype=dtype)


def alone(tensors: dict, base: BaseShapes, dtype: torch.dtype) -> tuple[str, packed.Packed]:
    """Return the digest and the packed form of one adapter by the ordinary way."""
    targets = {key.rpartition(".lora_")[0].rpartition(".")[2] for key in tensors}
    rank = max(tensor.shape[0] for key, tensor in tensors.items() if key.endswith("lora_A"))
    return revision.digest(tensors, rank, targets, BASE), packed.pack(tensors, dtype, base.fused)


def form_alone(tensors: dict, base: BaseShapes, dtype: torch.dtype) -> BatchForm:
    names = sorted(tensors)
    shapes, dtypes = ([getattr(tensors[name], one) for name in names] for one in ("shape", "dtype"))
    return form_of(names, shapes, dtypes, base, BASE, dtype)


def rows_of(adapters: list[dict]) -> torch.Tensor:
    return torch.stack([flatten([one[key] for key in sorted(one)]) for one in adapters])


@pytest.mark.long
@given(
    model_type=st.sampled_from(sorted(made_adapters.CONFIGS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    count=st.integers(1, 5),
    data=st.data(),
)
def test_digests_and_bytes_are_those_of_one_at_a_time(model_type, dtype, count, data):
    base = made_adapters.shapes(model_type)
    modules = data.draw(st.sets(st.sampled_from(sorted(base.modules())), min_size=1))
    ranks = {module: data.draw(st.sampled_from([1, 2, 5])) for module in sorted(modules)}

    def made(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        sizes = {f"{module}.lora_A": (ranks[module], base.modules()[module][0]) for module in ranks}
        sizes |= {f"{module}.lora_B": (base.modules()[module][1], ranks[module]) for module in ranks}
        return {key: torch.randn(size, generator=generator).to(dtype) for key, size in sizes.items()}

    adapters = [made(seed) for seed in range(count)]
    form = form_alone(adapters[0], base, dtype)
    values_ND = rows_of(adapters)
    made_ones = zip(adapters, form.digests(values_ND), form.pack(values_ND), strict=True)
    for one, digest, payload in made_ones:
        want_digest, want = alone(one, base, dtype)
        assert digest == want_digest
        assert form.layout == want.layout
        assert bytes(payload) == bytes(want.tobytes())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_tensor_with_no_number_is_named(bad: float, dtype: torch.dtype):
    good, spoiled = adapter(1, dtype=dtype), adapter(2, dtype=dtype)
    key = sorted(spoiled)[3]
    spoiled[key][-1, -1] = bad
    form = form_alone(good, DENSE, dtype)
    with pytest.raises(AdapterError) as alone:
        validate(spoiled, None, DENSE.modules())
    assert form.first_fault(rows_of([spoiled])[0]) == str(alone.value)


def test_what_does_not_fit_is_refused_as_alone():
    tensors, q = adapter(0), "model.layers.0.self_attn.q_proj.lora_A"
    unfit = {
        "empty": {},
        "without a partner": {q: tensors[q]},
        "of another width": tensors | {q: torch.zeros(2, 9)},
        "unknown": tensors | {"model.layers.9.self_attn.q_proj.lora_A": tensors[q]},
        "no factor": tensors | {"model.layers.0.self_attn.q_proj": tensors[q]},
        "of two dtypes": tensors | {q: tensors[q].half()},
        "of one axis": tensors | {q: torch.zeros(8)},
    }
    for name, one in unfit.items():
        with pytest.raises(AdapterError) as alone:
            validate(one, None, DENSE.modules())
        with pytest.raises(AdapterError) as many:
            form_alone(one, DENSE, torch.float32)
        assert str(many.value) == str(alone.value), name
    with pytest.raises(AdapterError, match=r"float32.*bfloat16"):
        form_alone(tensors, DENSE, torch.bfloat16)
