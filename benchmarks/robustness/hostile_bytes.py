"""Mutations of results as bytes: wrong numbers, wrong types, wrong tensors, damage."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

NUMBERS: list[Any] = [
    -1, 0, 0.5, 1e9, 1e30, -1e30, 10**9, 10**18, 2**53, 2**63, 2**64, 10**400, 1e308, 5e-324,
    True, False, None, "", "1", "x" * 5000, [], [1], {}, {"a": 1}, float("nan"), float("inf"), float("-inf"),
]  # fmt: skip
TEXTS: list[Any] = ["\x1b[2J\x1b]0;x\x07", "[/red]", "a\nb", "\u202e", "x" * 301, "x" * 10**6, "", 5, True, [], {}]
TYPES: list[Any] = [
    "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "C64", "C128", "BOOL", "F16", "BF16", "F64", "I8", "I16", "I32",
    "I64", "U8", "U16", "U32", "U64", "QINT8", "", "\x1b[2J", None, 5, [], {},
]  # fmt: skip
WIDTHS = [
    ("F8_E4M3", 1), ("F8_E5M2", 1), ("BOOL", 1), ("U8", 1), ("I8", 1), ("F16", 2), ("BF16", 2), ("I32", 4), ("U32", 4),
    ("F64", 8), ("I64", 8), ("C64", 8),
]  # fmt: skip
SHAPES: list[Any] = [
    [],
    [0],
    [-1],
    [1],
    [7],
    [2, 3],
    [10**9, 10**9],
    [2**63],
    [0, 10**18],
    None,
    "x",
    [1.5],
    [True],
    [[1]],
]
FLOATS = [float("nan"), float("inf"), float("-inf"), 3.4e38, -3.4e38, 1e30, 1e-45, -1.0, 0.5, 1e9]


def mutated(body: bytes, rng: random.Random) -> bytes:
    """A result that differs from a true one."""
    try:
        return rng.choice(_WAYS)(body, rng)
    except (ValueError, KeyError, IndexError, struct.error):  # this result has nothing to do that to
        return _noise(body, rng)


def mutated_head(head: bytes, rng: random.Random) -> bytes:
    """The head of a message with one field changed."""
    fields = json.loads(head)
    fields[rng.choice([*fields, "more"])] = rng.choice(NUMBERS + TEXTS)
    return json.dumps(fields).encode()


def parts(body: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """The values of a body, the head of its tensors, and their bytes."""
    (size,) = struct.unpack_from("<I", body)
    (length,) = struct.unpack_from("<Q", body, 4 + size)
    start = 12 + size
    return json.loads(body[4 : 4 + size]), json.loads(body[start : start + length]), body[start + length :]


def whole(values: Any, head: Any, data: bytes) -> bytes:
    """A body of these parts."""
    text, top = json.dumps(values).encode(), json.dumps(head).encode()
    return struct.pack("<I", len(text)) + text + struct.pack("<Q", len(top)) + top + data


def _value(body: bytes, rng: random.Random) -> bytes:
    values, head, data = parts(body)
    values[rng.choice(["examples", "steps", "nbytes", "norm", "metrics", "failure"])] = rng.choice(NUMBERS)
    return whole(values, head, data)


def _count(body: bytes, rng: random.Random) -> bytes:
    values, head, data = parts(body)
    name = rng.choice(["examples", "steps"])
    values[name] = max(0, values[name] + rng.choice([-1, 1, 2, 100, 10**6, 10**12]))
    return whole(values, head, data)


def _metric(body: bytes, rng: random.Random) -> bytes:
    values, head, data = parts(body)
    names = [*values["metrics"], "loss", "cluster", "validation_weight", "global/accuracy", "\x1b[2J", "x" * 500]
    for name in rng.sample(names, rng.choice([1, 2])):
        values["metrics"][name] = rng.choice(NUMBERS)
    if rng.random() < 0.1:
        values["metrics"] |= {f"m{number}": 1.0 for number in range(300)}
    return whole(values, head, data)


def _failure(body: bytes, rng: random.Random) -> bytes:
    values, head, data = parts(body)
    values["failure"] = rng.choice(TEXTS)
    return whole(values, head, data)


def _fields(body: bytes, rng: random.Random) -> bytes:
    values, head, data = parts(body)
    if rng.random() < 0.5:
        values.pop(rng.choice([*values]))
    else:
        values[rng.choice(["__proto__", "partial_sum", "refused", "x"])] = rng.choice(NUMBERS)
    return whole(rng.choice([values, values, [values], None, 5, "x"]), head, data)


def _type(body: bytes, rng: random.Random) -> bytes:
    values, head, data = parts(body)
    head[_tensor(head, rng)]["dtype"] = rng.choice(TYPES)
    return whole(values, head, data)


def _same_size_type(body: bytes, rng: random.Random) -> bytes:
    """Another type whose bytes fit, so that the library unpacks it."""
    values, head, data = parts(body)
    about = head[_tensor(head, rng)]
    size = about["data_offsets"][1] - about["data_offsets"][0]
    about["dtype"], width = rng.choice(WIDTHS)
    about["shape"] = [size // width]
    return whole(values, head, data)


def _shape(body: bytes, rng: random.Random) -> bytes:
    values, head, data = parts(body)
    about = head[_tensor(head, rng)]
    own = about["shape"]
    about["shape"] = rng.choice([*SHAPES, [1, *own], [*own, 1], [*own, 0], own[::-1]])
    return whole(values, head, data)


def _offsets(body: bytes, rng: random.Random) -> bytes:
    values, head, data = parts(body)
    about = head[_tensor(head, rng)]
    about["data_offsets"] = rng.choice([[0, 0], [0, len(data) + 4], [4, 0], [-4, 4], [0, 2**63], [0], None, "x"])
    return whole(values, head, data)


def _names(body: bytes, rng: random.Random) -> bytes:
    values, head, data = parts(body)
    name = _tensor(head, rng)
    about = head.pop(name)
    new = rng.choice(["model", "control", "rows", "../x", "", "x" * 500, "\x1b[2J", "__metadata__", None])
    if new is not None:
        head[new] = about
    return whole(values, head, data)


def _added(body: bytes, rng: random.Random) -> bytes:
    values, head, data = parts(body)
    for number in range(rng.choice([1, 1, 100])):
        head[f"extra{number}"] = {"dtype": "F32", "shape": [1], "data_offsets": [len(data), len(data) + 4]}
        data += struct.pack("<f", rng.choice(FLOATS))
    return whole(values, head, data)


def _numbers(body: bytes, rng: random.Random) -> bytes:
    values, head, data = parts(body)
    start, stop = head[_tensor(head, rng)]["data_offsets"]
    changed = bytearray(data)
    whole_vector = rng.random() < 0.3
    value = struct.pack("<f", rng.choice(FLOATS))
    places = range(start, stop - 3, 4)
    for place in places if whole_vector else [rng.choice(places)]:
        changed[place : place + 4] = value
    return whole(values, head, bytes(changed))


def _noise(body: bytes, rng: random.Random) -> bytes:
    changed = bytearray(body)
    for _ in range(rng.choice([1, 5, 100])):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _cut(body: bytes, rng: random.Random) -> bytes:
    return body[: rng.randrange(len(body))] or b"\0"


def _longer(body: bytes, rng: random.Random) -> bytes:
    return body + rng.choice([b"\0", body, rng.randbytes(1000)])


def _garbage(body: bytes, rng: random.Random) -> bytes:
    return rng.choice([rng.randbytes(rng.randrange(1, 5000)), b"\x80\x05K\x01.", b"{" * 3000, b"[" * 100_000])


def _lengths(body: bytes, rng: random.Random) -> bytes:
    return struct.pack("<I", rng.choice([0, 1, 2**31, 2**32 - 1, len(body)])) + body[4:]


def _tensor(head: dict[str, Any], rng: random.Random) -> str:
    return rng.choice([name for name in head if name != "__metadata__"])


_WAYS = [
    _value, _count, _metric, _failure, _fields, _type, _same_size_type, _shape, _offsets, _names, _added, _numbers,
    _noise, _cut, _longer, _garbage, _lengths,
]  # fmt: skip
