"""The Tinker API's protobuf bodies as arrays, and back. Numbers inside `bytes` are little-endian.

Sparse tensors (CSR) become dense here; nothing behind this module knows of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from engine.errors import ConfigError
from engine.tinker import schema

Array = NDArray[Any]
# bfloat16 comes as the upper half of a float32.
DTYPES = {schema.FLOAT32: "<f4", schema.INT64: "<i8", schema.INT32: "<i4", schema.BFLOAT16: "<u2"}
# Most values of a call's dense tensors: a sparse one of a few bytes may claim any shape.
MOST_VALUES = 1 << 24


@dataclass(frozen=True)
class WireDatum:
    """One sample: token ids (N,), and each loss input as an array (N,) or (N, K)."""

    tokens: Array
    inputs: Mapping[str, Array]


@dataclass(frozen=True)
class WireBatch:
    """A forward_backward call of a model, as it came."""

    model_id: str
    seq_id: int
    data: tuple[WireDatum, ...]
    loss: str
    settings: Mapping[str, float | str]
    forward_only: bool


class UnreadData(ConfigError):
    """The data of a call are malformed or not supported; the call's model and number are known."""

    def __init__(self, sentence: str, model_id: str = "", seq_id: int = 0):
        super().__init__(sentence)
        self.model_id, self.seq_id = model_id, seq_id


def read_batch(body: bytes) -> WireBatch:
    """Parse a ForwardBackwardRequest.

    Raises `UnreadData` for data that are not supported, and `ConfigError` for what is no such request.
    """
    message = schema.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise ConfigError(
            "The body is not a ForwardBackwardRequest in protobuf. Use the SDK tinker 0.38.0."
        ) from None
    settings: dict[str, float | str] = dict(message.loss_fn_config)
    settings |= {
        name: getattr(value, value.WhichOneof("which") or "number")
        for name, value in message.loss_fn_config_v2.items()
    }
    try:
        _refuse_large(message.data)
        data = tuple(_datum(datum, number) for number, datum in enumerate(message.data))
    except ConfigError as error:
        raise UnreadData(str(error), message.model_id, message.seq_id) from None
    return WireBatch(message.model_id, message.seq_id, data, message.loss_fn, settings, message.forward_only)


def _refuse_large(data: Sequence[Any]) -> None:
    shapes = (tensor.shape for datum in data for tensor in datum.loss_fn_inputs.values())
    values = sum(prod(shape) for shape in shapes if all(size > 0 for size in shape))
    if values > MOST_VALUES:
        raise ConfigError(f"The tensors have {values} values, over {MOST_VALUES}. Send fewer data in a call.")


def _datum(message: Any, number: int) -> WireDatum:
    pieces = []
    for chunk in message.model_input:
        if chunk.WhichOneof("which") != "encoded_text":
            raise ConfigError(f"Datum {number} holds images or sound, which are not supported. Send text.")
        pieces.append(_numbers(chunk.encoded_text.data, "<i4", f"the tokens of datum {number}"))
    tokens = np.concatenate(pieces) if pieces else np.empty(0, "<i4")
    inputs = {
        name: read_tensor(tensor, f"{name!r} of datum {number}")
        for name, tensor in message.loss_fn_inputs.items()
    }
    return WireDatum(tokens, inputs)


def read_tensor(message: Any, what: str) -> Array:
    """Return a Tensor message as an array of its shape: float32, int64 or int32; a CSR one dense."""
    dtype = DTYPES.get(message.dtype)
    if dtype is None:
        raise ConfigError(f"{what} has the dtype {message.dtype}. Send float32, int64, int32 or bfloat16.")
    sparse = message.WhichOneof("which") == "sparse_csr"
    values = _numbers(message.sparse_csr.values if sparse else message.dense, dtype, what)
    if message.dtype == schema.BFLOAT16:
        values = (values.astype("<u4") << 16).view("<f4")
    shape = tuple(message.shape)
    if any(size < 0 for size in shape):
        raise ConfigError(f"{what} has the shape {shape}. No size may be below 0.")
    if sparse:
        return _dense(message.sparse_csr, values, shape, what)
    if not shape:
        shape = values.shape
    if prod(shape) != values.size:
        raise ConfigError(f"{what} has {values.size} values, but the shape {shape}. Make them agree.")
    return values.reshape(shape)


def _dense(message: Any, values: Array, shape: tuple[int, ...], what: str) -> Array:
    rows = _numbers(message.crow_indices, "<i8", what)
    columns = _numbers(message.col_indices, "<i8", what)
    fits = (
        len(shape) == 2
        and rows.size == shape[0] + 1
        and columns.size == values.size
        and rows[0] == 0
        and rows[-1] == values.size
        and bool((np.diff(rows) >= 0).all())
        and bool(((columns >= 0) & (columns < shape[1])).all())
    )
    if not fits:
        raise ConfigError(f"{what} is not a sparse matrix (CSR) of the shape {shape}. Send it dense.")
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return dense


def _numbers(data: bytes, dtype: str, what: str) -> Array:
    if len(data) % np.dtype(dtype).itemsize:
        raise ConfigError(f"{what} has {len(data)} bytes, which are no whole numbers of {dtype[1:]}.")
    return np.frombuffer(data, dtype)


def write_output(logprobs: Sequence[Array], metrics: Mapping[str, float]) -> bytes:
    """Return a ForwardBackwardOutput: `logprobs` (N,) or (N, K) of each datum, and metrics.

    Each key of `metrics` is `name:reduction`, as the SDK requires. Neighbours of the same K share a record.
    """
    message = schema.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    begin = 0
    while begin < len(logprobs):
        trailing = logprobs[begin].shape[1:]
        end = begin
        while end < len(logprobs) and logprobs[end].shape[1:] == trailing:
            end += 1
        flat = [np.ascontiguousarray(one, "<f4") for one in logprobs[begin:end]]
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(flat))
        field = record.fields["logprobs"]
        field.data = b"".join(one.tobytes() for one in flat)
        field.offsets = np.cumsum([0, *(one.nbytes for one in flat)], dtype="<i8").tobytes()
        field.dtype = schema.FLOAT32
        field.trailing_shape.extend(trailing)
        begin = end
    return bytes(message.SerializeToString())


def write_samples(
    samples: Sequence[Mapping[str, Any]],
    prompt_logprobs: Sequence[float | None] | None = None,
    topk: tuple[Array, Array] | None = None,
) -> bytes:
    """Return a SampleResponse of the engine's samples: token ids, their log-probabilities, `stop_reason`.

    `prompt_logprobs` has one value a prompt token, None where there is none. `topk` has token ids and
    log-probabilities (N, K) of the prompt's likeliest tokens; empty cells are 0 and -99999.
    """
    message = schema.SampleResponse()
    for sample in samples:
        message.sequences.add(
            stop_reason=schema.STOP if sample["stop_reason"] == "stop" else schema.LENGTH,
            tokens=np.asarray(sample["tokens"], "<i4").tobytes(),
            logprobs=np.asarray(sample["logprobs"], "<f4").tobytes(),
        )
    if prompt_logprobs is not None:
        filled = [np.nan if value is None else value for value in prompt_logprobs]
        message.prompt_logprobs = np.asarray(filled, "<f4").tobytes()
    if topk is not None:
        ids, values = topk
        cells = message.topk_prompt_logprobs
        cells.token_ids, cells.logprobs = ids.astype("<i4").tobytes(), values.astype("<f4").tobytes()
        cells.length, cells.k = ids.shape
    return bytes(message.SerializeToString())
