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
# Message -> its fields by number: name and type. `*` repeats a field, `map:` is a map from strings, `?` has
# presence, `|` is one of a message's alternatives. A name with a capital is another message.
MESSAGES: dict[str, dict[int, tuple[str, str]]] = {
    "Bytes": {1: ("data", "bytes")},
    "Image": {
        1: ("data", "bytes"),
        2: ("format", "string"),
        3: ("expected_tokens", "int32?"),
    },
    "Chunk": {1: ("encoded_text", "Bytes|"), 2: ("image", "Image|"), 3: ("dmel", "Bytes|")},
    "Sparse": {1: ("values", "bytes"), 2: ("crow_indices", "bytes"), 3: ("col_indices", "bytes")},
    "Tensor": {
        1: ("dense", "bytes|"),
        2: ("sparse_csr", "Sparse|"),
        3: ("dtype", "int32"),
        4: ("shape", "int64*"),
    },
    "Datum": {1: ("model_input", "Chunk*"), 2: ("loss_fn_inputs", "map:Tensor")},
    "Setting": {1: ("number", "double|"), 2: ("text", "string|")},
    "ForwardBackwardRequest": {
        1: ("model_id", "string"),
        2: ("seq_id", "int32"),
        3: ("data", "Datum*"),
        4: ("loss_fn", "string"),
        5: ("loss_fn_config", "map:double"),
        6: ("forward_only", "bool"),
        7: ("loss_fn_config_v2", "map:Setting"),
    },
    "BatchedTensor": {
        1: ("data", "bytes"),
        2: ("offsets", "bytes"),
        3: ("dtype", "int32"),
        4: ("trailing_shape", "int64*"),
    },
    "ArrayRecord": {
        1: ("type_tag", "string"),
        2: ("fields", "map:BatchedTensor"),
        3: ("num_datums", "int64"),
    },
    "ForwardBackwardOutput": {
        1: ("loss_fn_output_type", "string"),
        2: ("loss_fn_outputs", "ArrayRecord*"),
        3: ("metrics", "map:double"),
    },
    "TopkLogprobs": {
        1: ("token_ids", "bytes"),
        2: ("logprobs", "bytes"),
        3: ("k", "uint32"),
        4: ("length", "uint32"),
    },
    "SampledSequence": {1: ("stop_reason", "int32"), 2: ("tokens", "bytes"), 3: ("logprobs", "bytes?")},
    "SampleResponse": {
        1: ("sequences", "SampledSequence*"),
        2: ("prompt_logprobs", "bytes?"),
        3: ("topk_prompt_logprobs", "TopkLogprobs?"),
        4: ("prompt_cache_hit_tokens", "int32"),
    },
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
        for number, (name, kind) in fields.items():
            _add_field(message, number, name, kind)
    pool = DescriptorPool()
    pool.Add(file)
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in MESSAGES}


_known = _classes()
ForwardBackwardRequest = _known["ForwardBackwardRequest"]
ForwardBackwardOutput = _known["ForwardBackwardOutput"]
SampleResponse = _known["SampleResponse"]
Tensor = _known["Tensor"]
