"""The protobuf messages of the Tinker API, in a file and a package of our own.

Numbers and types are those that the SDK 0.38.0 sends and expects; only these are on the wire. A process that
also imports the SDK has both schemas, which is why the names of file and package differ.
"""

from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
STOP, LENGTH = 0, 1
PACKAGE = "graftwork.tinker"
# Message -> its fields, numbered from 1: name and type. `*` repeats a field, `map:` is a map from strings,
# `?` has presence, `|` is one of a message's alternatives. A name with a capital is another message.
MESSAGES = {
    "Bytes": "data bytes",
    "Image": "data bytes, format string, expected_tokens int32?",
    "Chunk": "encoded_text Bytes|, image Image|, dmel Bytes|",
    "Sparse": "values bytes, crow_indices bytes, col_indices bytes",
    "Tensor": "dense bytes|, sparse_csr Sparse|, dtype int32, shape int64*",
    "Datum": "model_input Chunk*, loss_fn_inputs map:Tensor",
    "Setting": "number double|, text string|",
    "ForwardBackwardRequest": "model_id string, seq_id int32, data Datum*, loss_fn string, "
    "loss_fn_config map:double, forward_only bool, loss_fn_config_v2 map:Setting",
    "BatchedTensor": "data bytes, offsets bytes, dtype int32, trailing_shape int64*",
    "ArrayRecord": "type_tag string, fields map:BatchedTensor, num_datums int64",
    "ForwardBackwardOutput": "loss_fn_output_type string, loss_fn_outputs ArrayRecord*, metrics map:double",
    "TopkLogprobs": "token_ids bytes, logprobs bytes, k uint32, length uint32",
    "SampledSequence": "stop_reason int32, tokens bytes, logprobs bytes?",
    "SampleResponse": "sequences SampledSequence*, prompt_logprobs bytes?, "
    "topk_prompt_logprobs TopkLogprobs?, prompt_cache_hit_tokens int32",
}


def _add_field(message: DescriptorProto, number: int, name: str, kind: str) -> None:
    field = message.field.add(name=name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
    plain = kind.removeprefix("map:").rstrip("*?|")
    if kind.startswith("map:"):
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _add_field(entry, 1, "key", "string")
        _add_field(entry, 2, "value", plain)
        field.type, field.type_name = field.TYPE_MESSAGE, f".{PACKAGE}.{message.name}.{entry.name}"
    elif plain[0].isupper():
        field.type, field.type_name = field.TYPE_MESSAGE, f".{PACKAGE}.{plain}"
    else:
        field.type = getattr(FieldDescriptorProto, f"TYPE_{plain.upper()}")
    if kind.endswith("*") or kind.startswith("map:"):
        field.label = FieldDescriptorProto.LABEL_REPEATED
    if kind.endswith("|"):
        if not message.oneof_decl:
            message.oneof_decl.add(name="which")
        field.oneof_index = 0
    # Presence of a scalar takes an alternative of its own in proto3.
    if kind.endswith("?") and not plain[0].isupper():
        field.oneof_index, field.proto3_optional = len(message.oneof_decl), True
        message.oneof_decl.add(name=f"_{name}")


def _classes() -> dict[str, Any]:
    file = FileDescriptorProto(name="graftwork_tinker.proto", package=PACKAGE, syntax="proto3")
    for title, fields in MESSAGES.items():
        message = file.message_type.add(name=title)
        for number, field in enumerate(fields.split(", "), 1):
            _add_field(message, number, *field.split())
    pool = DescriptorPool()
    pool.Add(file)
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in MESSAGES}


_known = _classes()
ForwardBackwardRequest = _known["ForwardBackwardRequest"]
ForwardBackwardOutput = _known["ForwardBackwardOutput"]
SampleResponse = _known["SampleResponse"]
Tensor = _known["Tensor"]
