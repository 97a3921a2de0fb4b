"""A batch of events taken apart as text: each payload is a slice of the body, the very bytes that came (B-6)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]  # missing from the stubs
from typing import Final

from relay.core.errors import InvalidInput
from relay.core.event_types import check_event_type, is_reserved
from relay.core.fingerprint import check_key
from relay.core.jsontext import MAX_DEPTH, check_depth, decode, invalid_at, value_end
from relay.core.seconds import parse_expires_in

#: Events of one batch.
MAX_EVENTS: Final = 1_000
#: Faults that are told at once.
MAX_FAULTS: Final = 20

_MEMBERS: Final = frozenset({"type", "payload", "idempotency_key", "expires_in"})
_SPACE: Final = re.compile(r"[ \t\n\r]*")
#: A member's name and colon as nearly all are written; what does not match is read step by step, with its errors.
_PLAIN_NAME: Final = re.compile(r'[ \t\n\r]*"([^"\\\x00-\x1f]*)"[ \t\n\r]*:[ \t\n\r]*')
#: The beginning of an event as nearly all are written, up to its payload, and the end behind that.
_PLAIN_EVENT: Final = re.compile(
    r'\{[ \t\n\r]*"type"[ \t\n\r]*:[ \t\n\r]*"([^"\\\x00-\x1f]*)"[ \t\n\r]*,'
    r'[ \t\n\r]*"payload"[ \t\n\r]*:[ \t\n\r]*'
)
_PLAIN_END: Final = re.compile(r"[ \t\n\r]*\}")
_COMMA: Final = re.compile(r"[ \t\n\r]*,")
#: A line's: without its own end.
_BLANK: Final = re.compile(r"[ \t\r]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchedEvent:
    """One event of a batch, its members checked."""

    type: str
    #: JSON, as spelled in the batch.
    payload: bytes
    idempotency_key: str | None
    #: Seconds.
    expires_in: float | None


def parse_batch(body: bytes, *, lines: bool) -> tuple[list[BatchedEvent], list[InvalidInput]]:
    """Take a JSON array of events apart, or with `lines` an event a line (NDJSON; blank lines do not count).

    An event is an object with `type` and `payload`, and perhaps `idempotency_key` and `expires_in`, where null is as
    good as nothing. A payload may nest as deep as the body of a single event. Returns the events, and what is wrong
    with any of them: the first `MAX_FAULTS` faults, each naming its index and member, such as `[3].type`; the events
    are only of use where there are none.

    Raises InvalidJson where the text is not JSON, and InvalidInput with field `body` for anything but an array, for no
    events (`empty_batch`) and for more than `MAX_EVENTS` (`too_many_events`).
    """
    text = decode(body)
    # The event's own level, and the array's.
    check_depth(text, MAX_DEPTH + (1 if lines else 2))
    batch = _Batch(text)
    if lines:
        batch.read_lines()
    else:
        batch.read_array()
    if not batch.count:
        raise InvalidInput("The batch holds no events: send one at least.", field="body", code="empty_batch")
    return batch.events, batch.faults


class _Batch:
    """The reading of one batch."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.count = 0
        self.events: list[BatchedEvent] = []
        self.faults: list[InvalidInput] = []
        #: Whether events may have no members but a type and a payload, in this order.
        self._are_plain = True
        #: Types that were found good.
        self._good: set[str] = set()

    def read_array(self) -> None:
        text = self._text
        at = self._skip(0)
        if not text.startswith("[", at):
            value_end(text, at)
            raise InvalidInput(
                "The body is not an array: send [event, ...], or an event a line as application/x-ndjson.",
                field="body",
                code="not_an_array",
            )
        at = self._skip(at + 1)
        if text.startswith("]", at):
            at += 1
        else:
            while True:
                at = self._skip(self._read_event(at))
                if text.startswith("]", at):
                    at += 1
                    break
                at = self._skip(self._expect(",", at))
        at = self._skip(at)
        if at != len(text):
            raise invalid_at("The body is not JSON: something follows the array", text, at)

    def read_lines(self) -> None:
        text = self._text
        at = 0
        while at < len(text):
            end = text.find("\n", at)
            end = len(text) if end < 0 else end
            at = self._blank(at)
            if at < end:
                after = self._blank(self._read_event(at))
                if after > end:
                    raise invalid_at("An event goes over several lines: write each in one line", text, end)
                if after < end:
                    raise invalid_at("Something follows the event: begin a new line for the next one", text, after)
            at = end + 1

    def _read_event(self, at: int) -> int:
        index = self.count
        self.count += 1
        if index == MAX_EVENTS:
            raise InvalidInput(
                f"The batch holds more than {MAX_EVENTS} events: send several.", field="body", code="too_many_events"
            )
        if not self._text.startswith("{", at):
            self._fault(f"[{index}]", "An event is an object with type and payload.", "not_an_object")
            return value_end(self._text, at)
        if self._are_plain and (plain := _PLAIN_EVENT.match(self._text, at)) and plain[1] in self._good:
            start = plain.end()
            end = value_end(self._text, start)
            if close := _PLAIN_END.match(self._text, end):
                self._take(plain[1], start, end)
                return close.end()
            # With more members, and so have the others, most likely: their payloads need not be scanned twice.
            self._are_plain = False
        found, end = self._read_members(at, index)
        self._judge(index, found)
        return end

    def _read_members(self, at: int, index: int) -> tuple[dict[str, tuple[int, int]], int]:
        """Return where the object's members' values begin and end, by name, and where the object ends."""
        text = self._text
        found: dict[str, tuple[int, int]] = {}
        at = self._skip(at + 1)
        if text.startswith("}", at):
            return found, at + 1
        while True:
            if plain := _PLAIN_NAME.match(text, at):
                name, start = plain[1], plain.end()
            else:
                name, at = self._string(self._skip(at))
                start = self._skip(self._expect(":", self._skip(at)))
            end = value_end(text, start)
            if name in found:
                self._fault(f"[{index}].{_shown(name)}", "The member occurs twice in its event: keep one.", "duplicate")
            elif name not in _MEMBERS:
                self._fault(
                    f"[{index}].{_shown(name)}",
                    "There is no such field: leave it out, or put it into payload.",
                    "unknown_field",
                )
            found[name] = (start, end)
            if comma := _COMMA.match(text, end):
                at = comma.end()
            else:
                return found, self._expect("}", self._skip(end))

    def _judge(self, index: int, found: dict[str, tuple[int, int]]) -> None:
        payload = found.get("payload")
        if payload is None:
            self._fault(f"[{index}].payload", "The field is missing: send it.", "required")
        faults = len(self.faults)
        event_type = self._type(index, found)
        key = self._key(index, found)
        expires_in = self._expires_in(index, found)
        if payload is not None and event_type is not None and faults == len(self.faults):
            self._take(event_type, *payload, key=key, expires_in=expires_in)

    def _take(
        self, event_type: str, start: int, end: int, *, key: str | None = None, expires_in: float | None = None
    ) -> None:
        payload = self._text[start:end].encode()
        self.events.append(BatchedEvent(type=event_type, payload=payload, idempotency_key=key, expires_in=expires_in))

    def _type(self, index: int, found: dict[str, tuple[int, int]]) -> str | None:
        field = f"[{index}].type"
        if "type" not in found:
            self._fault(field, "The field is missing: send it.", "required")
            return None
        try:
            event_type = check_event_type(self._text_at(found["type"][0]), field)
        except InvalidInput as error:
            self._add(error)
            return None
        if is_reserved(event_type):
            self._fault(
                field, "relay and types that begin with relay. are Relay's own: choose another.", "reserved_type"
            )
        else:
            self._good.add(event_type)
        return event_type

    def _key(self, index: int, found: dict[str, tuple[int, int]]) -> str | None:
        place = self._given(found, "idempotency_key")
        if place is None:
            return None
        try:
            return check_key(self._text_at(place[0]), f"[{index}].idempotency_key")
        except InvalidInput as error:
            self._add(error)
            return None

    def _expires_in(self, index: int, found: dict[str, tuple[int, int]]) -> float | None:
        place = self._given(found, "expires_in")
        if place is None:
            return None
        try:
            return parse_expires_in(self._text[slice(*place)], f"[{index}].expires_in")
        except InvalidInput as error:
            self._add(error)
            return None

    def _given(self, found: dict[str, tuple[int, int]], name: str) -> tuple[int, int] | None:
        place = found.get(name)
        return None if place is None or self._text.startswith("null", place[0]) else place

    def _text_at(self, at: int) -> str | None:
        """Return the string that begins at `at`; None for a value of another kind. Both are known to be well formed."""
        return self._string(at)[0] if self._text.startswith('"', at) else None

    def _string(self, at: int) -> tuple[str, int]:
        if not self._text.startswith('"', at):
            raise invalid_at("The body is not JSON: expecting a member's name in double quotes", self._text, at)
        try:
            text, end = scanstring(self._text, at + 1, True)  # noqa: FBT003 - the standard library's signature
        except json.JSONDecodeError as error:
            raise invalid_at(f"The body is not JSON: {error.msg.removesuffix(' at')}", self._text, error.pos) from None
        return text, end

    def _expect(self, mark: str, at: int) -> int:
        if not self._text.startswith(mark, at):
            raise invalid_at(f"The body is not JSON: expecting {mark!r} here", self._text, at)
        return at + 1

    def _skip(self, at: int) -> int:
        found = _SPACE.match(self._text, at)
        return at if found is None else found.end()

    def _blank(self, at: int) -> int:
        found = _BLANK.match(self._text, at)
        return at if found is None else found.end()

    def _fault(self, field: str, message: str, code: str) -> None:
        self._add(InvalidInput(message, field=field, code=code))

    def _add(self, fault: InvalidInput) -> None:
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(fault)


def _shown(name: str) -> str:
    """A member's name as a path has it: bounded, and plain where it is odd."""
    return name[:80].encode("ascii", "backslashreplace").decode()
