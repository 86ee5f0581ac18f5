"""The messages of the API in protobuf, proto3: fields by their numbers, in one table.

`bytes` hold arrays, little-endian. Only what this server reads or writes is here; unknown fields are ignored.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "areax.service"
SCHEMA = """
ForwardBackwardRequest: 1 string model_id, 2 int32 seq_id, 3 repeated Datum data, 4 string loss_fn,
  5 map double loss_fn_config, 6 bool forward_only, 7 map LossConfigValue loss_fn_config_v2
LossConfigValue: 1 oneof double number, 2 oneof string text
Datum: 1 repeated Chunk model_input, 2 map Tensor loss_fn_inputs
Chunk: 1 oneof EncodedText encoded_text, 2 oneof Other image, 3 oneof Other dmel
EncodedText: 1 bytes tokens
Other:
Tensor: 1 oneof bytes dense, 2 oneof Other sparse_csr, 3 int32 dtype, 4 repeated int64 shape
ForwardBackwardOutput: 1 string loss_fn_output_type, 2 repeated ArrayRecord loss_fn_outputs, 3 map double metrics
ArrayRecord: 1 string type_tag, 2 map BatchedTensor fields, 3 int32 num_datums
BatchedTensor: 1 bytes data, 2 bytes offsets, 3 int32 dtype, 4 repeated int64 trailing_shape
SampleResponse: 1 repeated SampledSequence sequences, 2 bytes prompt_logprobs, 3 TopkLogprobs topk_prompt_logprobs,
  4 int32 prompt_cache_hit_tokens
SampledSequence: 1 int32 stop_reason, 2 bytes tokens, 3 bytes logprobs, 4 TopkLogprobs topk_sampled_logprobs
TopkLogprobs: 1 bytes token_ids, 2 bytes logprobs, 3 uint32 k, 4 uint32 length
"""
FLOAT32, INT64 = 1, 2  # of `dtype`

_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _FIELD.TYPE_STRING, "bytes": _FIELD.TYPE_BYTES, "bool": _FIELD.TYPE_BOOL, "double": _FIELD.TYPE_DOUBLE,
    "int32": _FIELD.TYPE_INT32, "int64": _FIELD.TYPE_INT64, "uint32": _FIELD.TYPE_UINT32,
}  # fmt: skip


def _messages(text: str) -> dict[str, Any]:
    """The message classes that lines such as `Name: 1 string field, 2 repeated Other field` declare."""
    file = descriptor_pb2.FileDescriptorProto(name="areax_service.proto", package=PACKAGE, syntax="proto3")
    for line in text.replace("\n  ", " ").strip().splitlines():
        name, _, fields = line.partition(":")
        message = file.message_type.add(name=name)
        for words in filter(None, (field.split() for field in fields.split(","))):
            number, *label, type_, own = words
            _add(message, int(number), label[0] if label else "", type_, own)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    get = lambda name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
    return {message.name: get(message.name) for message in file.message_type}


def _add(message: Any, number: int, label: str, type_: str, name: str) -> None:
    if label == "map":  # in protobuf a repeated message of keys and values
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _add(entry, 1, "", "string", "key")
        _add(entry, 2, "", type_, "value")
        label, type_ = "repeated", f"{message.name}.{entry.name}"
    field = message.field.add(name=name, number=number, label=_FIELD.LABEL_OPTIONAL)
    if label == "repeated":
        field.label = _FIELD.LABEL_REPEATED
    if label == "oneof":
        if not message.oneof_decl:
            message.oneof_decl.add(name="value")
        field.oneof_index = 0
    if type_ in _SCALARS:
        field.type = _SCALARS[type_]
    else:
        field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{PACKAGE}.{type_}"


MESSAGES = _messages(SCHEMA)
