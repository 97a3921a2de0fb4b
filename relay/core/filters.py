"""Filters of lists and replays: read from a query or a body, judged once, and written back the same."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from relay.core.errors import InvalidInput
from relay.core.event_types import check_event_type
from relay.core.model import DeadReason, Status
from relay.core.times import parse_time

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from datetime import datetime

#: What a list of deliveries can be filtered by.
DELIVERY_FILTERS: Final = ("status", "event_type", "reason", "since", "until")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRange:
    """Rows made at `since` or later, and before `until`."""

    since: datetime | None = None
    until: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryFilter:
    """Which deliveries are meant. None: any."""

    status: Status | None = None
    #: Exactly this type.
    event_type: str | None = None
    #: Why they are dead; then `status` is None or dead.
    reason: str | None = None
    made: TimeRange = TimeRange()

    def to_json(self) -> dict[str, str]:
        """Return what `parse_delivery_filter` would make this of."""
        values = {
            "status": None if self.status is None else self.status.label,
            "event_type": self.event_type,
            "reason": self.reason,
            "since": None if self.made.since is None else self.made.since.isoformat(),
            "until": None if self.made.until is None else self.made.until.isoformat(),
        }
        return {name: value for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        """One text for one filter, by which a cursor knows its list."""
        return json.dumps(self.to_json())


def parse_delivery_filter(
    given: Mapping[str, object], *, statuses: Collection[Status] = tuple(Status), default: Status | None = None
) -> DeliveryFilter:
    """Make a filter of the members of `given` that are filters; None counts as not given.

    Of `statuses` one may be asked for; `default` is the one that counts where none is. Raises InvalidInput.
    """
    status = default
    if (named := given.get("status")) is not None:
        by_label = {one.label: one for one in statuses}
        status = by_label[parse_choice(named, "status", by_label)]
    reason = given.get("reason")
    if reason is not None:
        reason = parse_choice(reason, "reason", [one.value for one in DeadReason])
        if status not in {None, Status.DEAD}:
            raise InvalidInput(
                "Only dead deliveries have a reason: leave out the status, or ask for dead.",
                field="reason",
                code="contradiction",
            )
    event_type = given.get("event_type")
    return DeliveryFilter(
        status=Status.DEAD if reason is not None else status,
        event_type=None if event_type is None else check_event_type(event_type, "event_type"),
        reason=reason,
        made=parse_time_range(given),
    )


def parse_time_range(given: Mapping[str, object]) -> TimeRange:
    """Make a range of `since` and `until`. Raises InvalidInput for what is no time, or a range that holds nothing."""
    since, until = (None if given.get(name) is None else parse_time(given[name], name) for name in ("since", "until"))
    if since is not None and until is not None and since >= until:
        raise InvalidInput("The end is not after the beginning: set until to a time after since.", field="until")
    return TimeRange(since=since, until=until)


def parse_choice(given: object, field: str, choices: Collection[str]) -> str:
    """Return `given` if it is one of the choices, else raise InvalidInput, which names those."""
    if not isinstance(given, str) or given not in choices:
        raise InvalidInput(
            f"There is no such {field} here: use one of {', '.join(choices)}.", field=field, code="not_a_choice"
        )
    return given
