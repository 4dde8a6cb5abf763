"""Hypothesis strategies that build any protobuf message from its descriptor: plausible values, extremes and nonsense."""

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

NAMES = ["", "tiny", "x", "../../etc/passwd", "a" * 300, "naïve", "\x00", "0", "r1", "decode-0"]
UNSIGNED = [0, 1, 2, 16, 255, 256, 319, 320, 2047, 2048, 2**31, 2**32 - 1]
SIGNED = [0, 1, -1, 1000, 1001, -1001, 2**31 - 1, -(2**31)]
WIDE = [0, 1, 2**32, 2**63, 2**64 - 1]
FLOATS = [0.0, 1.0, -1.0, 0.5, 2.0, 1e-300, 1e300, float("nan"), float("inf"), float("-inf")]

_KINDS = {
    FieldDescriptor.CPPTYPE_STRING: st.sampled_from(NAMES) | st.text(max_size=20),
    FieldDescriptor.CPPTYPE_INT32: st.sampled_from(SIGNED),
    FieldDescriptor.CPPTYPE_UINT32: st.sampled_from(UNSIGNED),
    FieldDescriptor.CPPTYPE_UINT64: st.sampled_from(WIDE),
    FieldDescriptor.CPPTYPE_DOUBLE: st.sampled_from(FLOATS),
    FieldDescriptor.CPPTYPE_FLOAT: st.sampled_from(FLOATS),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(0, 9),
}


def _value(field: FieldDescriptor, depth: int) -> st.SearchStrategy[object]:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=40)
    if field.message_type is not None:
        return messages(field.message_type, depth - 1)
    return _KINDS[field.cpp_type]


def messages(descriptor: Descriptor, depth: int = 4) -> st.SearchStrategy[Message]:
    """Messages of this type with some of their fields set, nested to `depth`."""
    fields = [field for field in descriptor.fields if depth > 0 or field.message_type is None]
    values = {
        field.name: st.lists(_value(field, depth), max_size=3) if field.is_repeated else _value(field, depth) for field in fields
    }
    return st.fixed_dictionaries({}, optional=values).map(lambda chosen: _build(descriptor, chosen))


def _build(descriptor: Descriptor, chosen: dict[str, object]) -> Message:
    for oneof in descriptor.oneofs:
        present = [field.name for field in oneof.fields if field.name in chosen]
        for name in present[1:]:
            del chosen[name]
    return GetMessageClass(descriptor)(**chosen)
