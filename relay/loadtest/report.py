"""What a load test found: one object with the same keys for every scenario, as JSON or as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One scenario's figures; None (JSON null) where a figure does not apply or could not be taken."""

    scenario: str
    #: Nothing was lost, and nothing came twice without an attempt on record for it.
    ok: bool
    #: Deliveries that were to be made, and those that came and are on record as delivered.
    offered: int | None = None
    delivered: int | None = None
    #: Offered, and not on record as delivered or never seen by the receiver.
    lost: int | None = None
    #: Requests beyond each delivery's first.
    duplicates: int | None = None
    rate_per_second: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    max_ms: float | None = None
    #: Statements that Postgres ran (BEGIN and the like among them), and replies that Redis wrote, by delivery.
    sql_per_delivery: float | None = None
    redis_per_delivery: float | None = None
    #: Role to CPU microseconds a delivery, user and system, children included.
    cpu_us_per_delivery: Mapping[str, float] = field(default_factory=dict)
    #: Peak resident memory of the largest worker process, in MiB.
    worker_rss_mb: float | None = None
    workers: int | None = None
    #: What was set, of the scenario, Relay and Postgres; under `figures` whatever only this scenario measures.
    settings: Mapping[str, object] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    cores: int

    @property
    def exit_code(self) -> int:
        """What the command ends with: 0 only if nothing was lost and all else is in order."""
        return 0 if self.ok else 1

    def json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    def table(self) -> str:
        """The same for people: a line a figure, what does not apply left out."""
        lines = []
        for name, value in asdict(self).items():
            if isinstance(value, dict):
                lines += [(f"{name}.{key}", item) for key, item in _flat(value)]
            elif value is not None:
                lines.append((name, value))
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:<{width}}  {_shown(value)}" for name, value in lines)


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The nearest-rank percentile of values in ascending order, `share` within 0 and 1; None where there are none."""
    if not ordered:
        return None
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _flat(values: Mapping[str, object]) -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            pairs += [(f"{name}.{key}", item) for key, item in _flat(value)]
        else:
            pairs.append((name, value))
    return pairs


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
