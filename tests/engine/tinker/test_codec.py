"""Our codec against the SDK's own converters, both ways."""

import numpy as np
import pytest
import tinker
from tinker.proto import request_conv, response_conv
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

from engine.errors import ConfigError
from engine.tinker import schema
from engine.tinker.codec import read_batch, read_tensor, write_output, write_samples


def sent(data: list[tinker.Datum], loss: str, config: dict | None = None) -> bytes:
    given = ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=config)
    request = ForwardBackwardRequest(forward_backward_input=given, model_id="s1:train:0", seq_id=7)
    return request_conv.forward_backward_request_to_proto(request).SerializeToString()


def datum(tokens: list[list[int]], **inputs: tinker.TensorData) -> tinker.Datum:
    chunks = [tinker.types.EncodedTextChunk(tokens=piece) for piece in tokens]
    return tinker.Datum(model_input=tinker.ModelInput(chunks=chunks), loss_fn_inputs=inputs)


def test_a_request_of_the_sdk_is_read_whole() -> None:
    targets = tinker.TensorData(data=[2, 3, 4], dtype="int64", shape=[3])
    weights = tinker.TensorData(data=[0.5, float("nan"), -2.0], dtype="float32", shape=[3])
    batch = read_batch(
        sent(
            [datum([[1, 2], [3]], target_tokens=targets, weights=weights)],
            "ppo",
            {"clip_low_threshold": 0.8, "kind": "plain"},
        )
    )
    assert (batch.model_id, batch.seq_id, batch.loss, batch.forward_only) == ("s1:train:0", 7, "ppo", False)
    assert dict(batch.settings) == {"clip_low_threshold": 0.8, "kind": "plain"}
    (read,) = batch.data
    assert read.tokens.tolist() == [1, 2, 3]
    assert read.inputs["target_tokens"].tolist() == [2, 3, 4]
    assert read.inputs["target_tokens"].dtype == np.int64
    np.testing.assert_array_equal(read.inputs["weights"], np.float32([0.5, np.nan, -2.0]))


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_a_sparse_tensor_becomes_the_matrix_that_it_means(dtype: str) -> None:
    matrix = np.array([[0, 5, 0], [0, 0, 0], [7, 0, 9], [0, 0, 3]])
    found = np.nonzero(matrix)
    sparse = tinker.TensorData(
        data=matrix[found].astype(dtype),
        dtype=dtype,
        shape=[4, 3],
        sparse_crow_indices=[0, 1, 1, 3, 4],
        sparse_col_indices=found[1].tolist(),
    )
    read = read_tensor(schema_tensor(sparse), "a")
    assert read.dtype == dtype
    np.testing.assert_array_equal(read, matrix)


def schema_tensor(data: tinker.TensorData) -> object:
    return schema.Tensor.FromString(request_conv._tensor_data_to_proto(data).SerializeToString())


def test_bfloat16_has_the_bits_of_the_sdks_widening() -> None:
    import torch

    values = torch.tensor([1.5, -3.0e10, float("nan"), 0.0], dtype=torch.bfloat16)
    raw = values.view(torch.int16).numpy().tobytes()
    read = read_tensor(schema.Tensor(dense=raw, dtype=schema.BFLOAT16, shape=[2, 2]), "a")
    np.testing.assert_array_equal(read, values.float().numpy().reshape(2, 2))


def test_the_sdk_reads_our_output_of_any_shapes() -> None:
    mine = [
        np.float32([-0.5, np.nan, -2.0]),
        np.float32([-1.0]),
        np.float32([[-1, -2], [-3, -4]]),
        np.empty((0, 2), np.float32),
    ]
    body = write_output(mine, {"loss:sum": 1.25})
    read = response_conv.deserialize_forward_backward_output(body)
    assert read.metrics == {"loss:sum": 1.25}
    for one, output in zip(mine, read.loss_fn_outputs, strict=True):
        np.testing.assert_array_equal(np.asarray(output["logprobs"].data).reshape(one.shape), one)
        assert output["logprobs"].shape == list(one.shape)


def test_the_sdk_reads_our_samples() -> None:
    ids, values = np.array([[0, 0], [4, 9]]), np.array([[-99999.0, -99999.0], [-0.1, -2.5]])
    samples = [
        {"tokens": [5, 6], "logprobs": [-0.25, -1.5], "stop_reason": "stop"},
        {"tokens": [7], "logprobs": [-0.5], "stop_reason": "length"},
    ]
    body = write_samples(samples, [None, -0.75], (ids, values))
    read = response_conv.deserialize_sample_response(body)
    assert [one.stop_reason for one in read.sequences] == ["stop", "length"]
    assert [list(one.tokens) for one in read.sequences] == [[5, 6], [7]]
    assert [list(one.logprobs) for one in read.sequences] == [[-0.25, -1.5], [-0.5]]
    np.testing.assert_array_equal(read.prompt_logprobs_np, np.float32([np.nan, -0.75]))
    np.testing.assert_array_equal(read.topk_prompt_logprobs_np.token_ids, ids)
    np.testing.assert_array_equal(read.topk_prompt_logprobs_np.logprobs, np.float32(values))


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (schema.Tensor(dense=b"abc", dtype=1, shape=[1]), "no whole numbers"),
        (schema.Tensor(dense=b"abcd", dtype=1, shape=[2]), r"\b1 values"),
        (schema.Tensor(dense=b"abcd", dtype=9, shape=[1]), "dtype 9"),
        (schema.Tensor(dense=b"", dtype=1, shape=[-1]), "below 0"),
        (schema.Tensor(sparse_csr={"values": b"abcd"}, dtype=1, shape=[1 << 20, 1 << 20]), "CSR"),
    ],
)
def test_a_malformed_tensor_is_refused_in_a_sentence(tensor: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_tensor(tensor, "'weights' of datum 0")


def test_a_few_bytes_that_claim_gigabytes_are_refused() -> None:
    rows = np.zeros(2, "<i8").tobytes()
    claimed = schema.Tensor(sparse_csr={"crow_indices": rows}, dtype=1, shape=[1, 1 << 24])
    call = schema.ForwardBackwardRequest(model_id="m", seq_id=1)
    for _ in range(2):
        call.data.add().loss_fn_inputs["weights"].CopyFrom(claimed)
    with pytest.raises(ConfigError, match="values, over"):
        read_batch(call.SerializeToString())


def test_an_image_and_garbage_are_refused() -> None:
    image = tinker.types.ImageChunk(data=b"x", format="png", expected_tokens=1)
    given = tinker.Datum(model_input=tinker.ModelInput(chunks=[image]), loss_fn_inputs={})
    with pytest.raises(ConfigError, match="images"):
        read_batch(sent([given], "cross_entropy"))
    with pytest.raises(ConfigError, match="not a ForwardBackwardRequest"):
        read_batch(b"\xff\xff garbage")
