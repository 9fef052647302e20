"""The two wire formats, as pure functions: v1 objects and v2 arrays of text, and the binary broadcasts of v2.

Payloads travel as ready JSON text: a record's numbers must reach the client digit for digit, so nobody
parses them on the way.
"""

import json
from dataclasses import dataclass
from typing import Any, Literal

Version = Literal["1.0.0", "2.0.0"]

_PUSH_KIND = 3
_BROADCAST_KIND = 4
_JSON_ENCODING = 1


@dataclass(frozen=True, slots=True)
class Message:
    """One frame from a client. `payload` is parsed JSON; both refs are strings or None in practice."""

    join_ref: Any
    ref: Any
    topic: str
    event: str
    payload: Any


@dataclass(frozen=True, slots=True)
class BinaryPush:
    """The `payload` of a broadcast that a v2 client sent as bytes."""

    event: str
    metadata: bytes
    encoding: int
    body: bytes


def dumps(value: Any) -> str:
    """Compact JSON, non-ASCII kept, as the real server writes it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def decode(version: Version, data: str | bytes) -> Message | None:
    """The client's frame, or None when it is to be ignored as the real server ignores it."""
    if isinstance(data, bytes):
        return _decode_binary(data) if version == "2.0.0" else None
    try:
        frame = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return _from_object(frame) if version == "1.0.0" else _from_array(frame)


def _from_object(frame: Any) -> Message | None:
    if not isinstance(frame, dict):
        return None
    return _message(
        frame.get("join_ref"), frame.get("ref"), frame.get("topic"), frame.get("event"), frame.get("payload")
    )


def _from_array(frame: Any) -> Message | None:
    if not isinstance(frame, list) or len(frame) != 5:
        return None
    join_ref, ref, topic, event, payload = frame
    return _message(join_ref, ref, topic, event, payload)


def _message(join_ref: Any, ref: Any, topic: Any, event: Any, payload: Any) -> Message | None:
    if not isinstance(topic, str) or not isinstance(event, str):
        return None
    return Message(join_ref, ref, topic, event, payload)


def _decode_binary(data: bytes) -> Message | None:
    """kind, five lengths, encoding, then join_ref, ref, topic, event, metadata and the body."""
    if len(data) < 7 or data[0] != _PUSH_KIND:
        return None
    position, parts = 7, []
    for size in data[1:6]:
        parts.append(data[position : position + size])
        position += size
    if position > len(data):
        return None
    join_ref, ref, topic, event = (part.decode("utf-8", "replace") for part in parts[:4])
    push = BinaryPush(event, parts[4], data[6], data[position:])
    return Message(join_ref or None, ref or None, topic, "broadcast", push)


def encode(  # noqa: PLR0917 - the frame's own order
    version: Version, join_ref: Any, ref: Any, topic: str, event: str, payload: str
) -> str:
    """A frame to a client. `payload` is JSON text, spliced in unchanged. v1 never carries the join ref."""
    if version == "1.0.0":
        return f'{{"ref":{dumps(ref)},"payload":{payload},"event":{dumps(event)},"topic":{dumps(topic)}}}'
    return f"[{dumps(join_ref)},{dumps(ref)},{dumps(topic)},{dumps(event)},{payload}]"


def encode_binary_broadcast(topic: str, push: BinaryPush) -> bytes:
    """A broadcast from another client, for a v2 socket."""
    names = (topic.encode(), push.event.encode(), push.metadata)
    header = bytes([_BROADCAST_KIND, *(len(name) for name in names), push.encoding])
    return header + b"".join(names) + push.body


def binary_push_of(payload: Any) -> BinaryPush | None:
    """The same broadcast in binary form, or None when it does not look like one (then nobody receives it)."""
    if isinstance(payload, BinaryPush):
        return payload
    if not isinstance(payload, dict) or not isinstance(payload.get("event"), str):
        return None
    return BinaryPush(payload["event"], b"", _JSON_ENCODING, dumps(payload.get("payload", {})).encode())


def json_push_of(payload: Any) -> str | None:
    """A client's broadcast as the JSON payload for other clients, or None when it cannot be one."""
    if not isinstance(payload, BinaryPush):
        return dumps(payload) if isinstance(payload, dict) and payload else None
    if payload.encoding != _JSON_ENCODING:
        return None
    body = payload.body.decode("utf-8", "replace")
    return f'{{"event":{dumps(payload.event)},"payload":{body},"type":"broadcast"}}'
