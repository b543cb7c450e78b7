"""The .proto files are the reference of the wire: everything in them carries its own comment."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

STATUS_NAMES = {code.name for code in grpc.StatusCode}


@pytest.fixture(scope="module")
def protos(project_root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[FileDescriptorProto]:
    """Our files as the compiler sees them, comments included."""
    out = tmp_path_factory.mktemp("descriptors") / "set.bin"
    root = project_root / "proto"
    sources = sorted(str(path.relative_to(root)) for path in root.glob("pagemirror/v1/*.proto"))
    include = files("grpc_tools").joinpath("_proto")
    options = ["--include_source_info", f"--descriptor_set_out={out}", f"--proto_path={root}", f"--proto_path={include}"]
    assert protoc.main(["protoc", *options, *sources]) == 0
    return list(FileDescriptorSet.FromString(out.read_bytes()).file)


def _comments(file: FileDescriptorProto) -> dict[tuple[int, ...], str]:
    """Leading comment of every commented element, by its path in the descriptor."""
    return {
        tuple(place.path): place.leading_comments.strip() for place in file.source_code_info.location if place.leading_comments
    }


def _message_paths(message: DescriptorProto, path: tuple[int, ...], name: str) -> dict[tuple[int, ...], str]:
    """A message, its fields, its nested types: path → dotted name."""
    found = {path: name}
    # A one-of of one member, made by the compiler for `optional`, is not in the source.
    found |= {(*path, 2, index): f"{name}.{field.name}" for index, field in enumerate(message.field)}
    for index, enum in enumerate(message.enum_type):
        found |= _enum_paths(enum, (*path, 4, index), f"{name}.{enum.name}")
    for index, nested in enumerate(message.nested_type):
        found |= _message_paths(nested, (*path, 3, index), f"{name}.{nested.name}")
    return found


def _enum_paths(enum: EnumDescriptorProto, path: tuple[int, ...], name: str) -> dict[tuple[int, ...], str]:
    """An enumeration and its values: path → dotted name."""
    return {path: name} | {(*path, 2, index): value.name for index, value in enumerate(enum.value)}


def _elements(file: FileDescriptorProto) -> dict[tuple[int, ...], str]:
    """Everything that must be commented: path → dotted name."""
    found: dict[tuple[int, ...], str] = {}
    for index, message in enumerate(file.message_type):
        found |= _message_paths(message, (4, index), message.name)
    for index, enum in enumerate(file.enum_type):
        found |= _enum_paths(enum, (5, index), enum.name)
    for index, service in enumerate(file.service):
        found[6, index] = service.name
        found |= {(6, index, 2, place): f"{service.name}.{method.name}" for place, method in enumerate(service.method)}
    return found


def test_every_element_has_a_leading_comment(protos: list[FileDescriptorProto]) -> None:
    """Messages, fields, enumerations and their values, services and RPCs: none is without a comment above it."""
    bare = [name for file in protos for path, name in _elements(file).items() if path not in _comments(file)]
    assert not bare, ", ".join(bare)


def test_every_rpc_lists_its_status_codes(protos: list[FileDescriptorProto]) -> None:
    """The comment of an RPC has the words "Status codes" followed by names that gRPC knows, OK among them."""
    rpcs = 0
    for file in protos:
        comments = _comments(file)
        for index, service in enumerate(file.service):
            for place, method in enumerate(service.method):
                rpcs += 1
                _, words, codes = comments[6, index, 2, place].partition("tatus codes")
                assert words, f"{method.name} does not list its status codes"
                named = set(re.findall(r"\b[A-Z][A-Z_]+\b", codes))
                assert "OK" in named, method.name
                unknown = {name for name in named if "_" in name and not name.startswith("FINISH_")} - STATUS_NAMES
                assert not unknown, f"{method.name}: {unknown}"
    assert rpcs == 12


def test_first_value_of_every_enumeration_is_unspecified(protos: list[FileDescriptorProto]) -> None:
    """Zero is what an absent value reads as, so it means nothing by itself, except where the wire carries plain bytes."""
    for file in protos:
        for enum in file.enum_type:
            if enum.name != "RowStatus":  # a packed column: its bytes are never absent one by one
                assert enum.value[0].name.endswith("_UNSPECIFIED")
