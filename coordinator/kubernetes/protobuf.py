"""Protobuf messages of Kubernetes' and the container runtime's interfaces, from tables of field numbers and types.

The tables define the messages at run time, so the build needs no protobuf compiler, and declare only used fields:
protobuf skips the others.  The descriptors live in a pool of their own and collide with no other package's.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

Fields = dict[str, tuple[int, str]]
"""field -> (number, type).  "*": repeated; "map": string to string; "map T": string to T; capitalised types are
messages.  Enumerations are int32."""

_F: Final = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {
    name: getattr(_F, f"TYPE_{name.upper()}")
    for name in ("bool", "bytes", "double", "int32", "int64", "string", "uint32", "uint64")
}


def build(package: str, table: dict[str, Fields]) -> dict[str, Any]:
    """The classes of these messages, by name."""
    file = descriptor_pb2.FileDescriptorProto(name=f"nvshare_{package}.proto", package=package, syntax="proto3")
    for message_name, fields in table.items():
        message = file.message_type.add(name=message_name)
        for name, (number, kind) in fields.items():
            _add_field(message, package, name, number, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = (pool.FindMessageTypeByName(f"{package}.{name}") for name in table)
    return {each.name: message_factory.GetMessageClass(each) for each in found}


def _add_field(message: Any, package: str, name: str, number: int, kind: str) -> None:
    first, _, of = kind.partition(" ")
    repeated = first == "map" or kind.startswith("*")
    field = message.field.add(name=name, number=number, label=_F.LABEL_REPEATED if repeated else _F.LABEL_OPTIONAL)
    if first == "map":
        entry_name = "".join(part.capitalize() for part in name.split("_")) + "Entry"
        entry = message.nested_type.add(name=entry_name)
        entry.options.map_entry = True
        for index, (part, part_kind) in enumerate((("key", "string"), ("value", of or "string")), start=1):
            _add_field(entry, package, part, index, part_kind)
        field.type, field.type_name = _F.TYPE_MESSAGE, f".{package}.{message.name}.{entry_name}"
        return
    kind = kind.removeprefix("*")
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _F.TYPE_MESSAGE, f".{package}.{kind}"
