"""Events, and their fan-out to the endpoints that want them: one statement, so one commit.

The statement also writes the 202's body. It knows the ids and the time first, an idempotency key must keep the very
bytes, and Postgres spells ids at a tenth of what it costs to read them here and spell them again.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from psycopg import sql

from relay.core.errors import Unavailable
from relay.core.event_types import is_reserved, patterns_for
from relay.store import arrays, idempotency
from relay.store.engine import run, transaction
from relay.store.idempotency import Claim, KeyReused

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    import sqlalchemy as sa

#: Times that a key may be found taken, and then free again, before the caller is asked to come back.
_TRIES = 10

# The endpoints are read in this very statement: one that was committed before it began gets the event.
# Each event brings the patterns that would match it, as words of one text, since unnest flattens arrays of arrays.
# Its fan-out is gathered into two arrays beside it, so that nothing has to be joined again.
_GIVEN = """
with r as materialized (
    select given.*, coalesce(f.delivery_ids, '{{}}') as delivery_ids, coalesce(f.endpoint_ids, '{{}}') as endpoint_ids,
        convert_to('{{"id":"' || given.id || '","type":"' || given.type || '","created_at":"'
            || to_char(now() at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') || '","deliveries":['
            || coalesce(f.spelled, '') || E']}}\n', 'UTF8') as answer
    from unnest(
        %s::uuid[], %s::uuid[], %s::text[], %s::text[], %s::bytea[], %s::uuid[], %s::text[], %s::float8[], %s::text[],
        %s::bool[]{columns}
    ) with ordinality as given(
        id, workspace_id, type, content_type, payload, api_key_id, request_id, expires_in, words, everything{names}, n
    )
    cross join lateral (
        select array_agg(id) as delivery_ids, array_agg(endpoint_id) as endpoint_ids,
            string_agg('{{"id":"' || id || '","endpoint_id":"' || endpoint_id || '"}}', ',') as spelled
        from (
            select relay.uuid7() as id, p.id as endpoint_id
            from relay.endpoints p
            where p.workspace_id = given.workspace_id and p.deleted_at is null and p.enabled and p.kind = 0
              and (p.event_types && string_to_array(given.words, ' ') or (p.event_types = '{{}}' and given.everything))
        ) one
    ) f
)
"""
_STORE = """,
e as (
    insert into relay.events
        (id, workspace_id, type, content_type, payload, api_key_id, request_id, delivery_ids{names})
    select id, workspace_id, type, content_type, payload, api_key_id, request_id, delivery_ids{names} from {source}
),
d as (
    insert into relay.deliveries (id, workspace_id, event_id, endpoint_id, event_type, expires_at)
    select f.id, s.workspace_id, s.id, f.endpoint_id, s.type, now() + make_interval(secs => s.expires_in)
    from {source} s cross join lateral unnest(s.delivery_ids, s.endpoint_ids) as f(id, endpoint_id)
)
select n, answer from {source}
"""
# Keys in their order: two transactions that want the same ones would else wait for each other. Whose key is taken is not
# in `s`, and so stores nothing. (With `in` alone the planner would make a join of it, event by event.)
_CLAIMED = """,
claimed as (
    insert into relay.idempotency_keys (workspace_id, key, fingerprint, event_id, response)
    select workspace_id, idempotency_key, fingerprint, id, answer from r where idempotency_key is not null
    order by workspace_id, idempotency_key
    on conflict (workspace_id, key) do nothing
    returning event_id
),
s as materialized (
    select * from r where idempotency_key is null or id in (select event_id from claimed)
)
"""
_INGEST = sql.SQL(_GIVEN.format(columns="", names="") + _STORE.format(names="", source="r"))
_INGEST_KEYED = sql.SQL(
    _GIVEN.format(columns=", %s::text[], %s::bytea[]", names=", idempotency_key, fingerprint")
    + _CLAIMED
    + _STORE.format(names=", idempotency_key", source="s")
)
# The same for events that are traced: statements of their own, so that tracing costs nothing where it is off.
_INGEST_TRACED = sql.SQL(
    _GIVEN.format(columns=", %s::text[]", names=", traceparent") + _STORE.format(names=", traceparent", source="r")
)
_INGEST_KEYED_TRACED = sql.SQL(
    _GIVEN.format(columns=", %s::text[], %s::bytea[], %s::text[]", names=", idempotency_key, fingerprint, traceparent")
    + _CLAIMED
    + _STORE.format(names=", idempotency_key, traceparent", source="s")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEvent:
    """An event that was checked and is not yet stored."""

    id: UUID
    workspace_id: UUID
    type: str
    content_type: str
    #: The bytes as received.
    payload: bytes
    api_key_id: UUID | None
    request_id: str | None
    #: Seconds from the commit on, after which what is not delivered is given up.
    expires_in: float | None = None
    claim: Claim | None = None
    #: The context of its trace (W3C); None where it is not traced.
    traceparent: str | None = None


class Taken(NamedTuple):
    """An event that is durable: the 202's body, and whether an earlier request with its key had made it."""

    answer: bytes
    replayed: bool


def ingest(connection: sa.Connection, batch: Sequence[NewEvent]) -> list[bytes | None]:
    """Store the events with a delivery for each endpoint that is enabled and subscribed; answer in the batch's order.

    An answer is the 202's body; None for an event whose idempotency key is taken: nothing of that one is stored (see
    `take`). On a key that an open transaction has taken this waits for its end. On an autocommit connection of the hot
    pool all of it is durable on return, and on an error none of it is stored (but for an error that hides the commit's
    reply, after which nobody knows). Touches Postgres only. The events' ids must differ; their types are not checked.
    """
    columns: list[object] = [
        arrays.uuids([event.id for event in batch]),
        arrays.uuids([event.workspace_id for event in batch]),
        arrays.texts([event.type for event in batch]),
        arrays.texts([event.content_type for event in batch]),
        arrays.byteas([event.payload for event in batch]),
        arrays.nullable_uuids([event.api_key_id for event in batch]),
        arrays.texts([event.request_id for event in batch]),
        arrays.nullable_float8s([event.expires_in for event in batch]),
        arrays.texts([_words(event.type) for event in batch]),
        arrays.bools([not is_reserved(event.type) for event in batch]),
    ]
    statement = _INGEST
    traced = any(event.traceparent is not None for event in batch)
    if traced:
        statement = _INGEST_TRACED
    if any(event.claim is not None for event in batch):
        statement = _INGEST_KEYED_TRACED if traced else _INGEST_KEYED
        columns.append(arrays.texts([None if event.claim is None else event.claim.key for event in batch]))
        columns.append(arrays.byteas([None if event.claim is None else event.claim.fingerprint for event in batch]))
    if traced:
        columns.append(arrays.texts([event.traceparent for event in batch]))
    answers: list[bytes | None] = [None] * len(batch)
    for place, answer in run(connection, statement, columns):
        answers[place - 1] = answer
    return answers


def take(connection: sa.Connection, batch: Sequence[NewEvent], *, retention_secs: int) -> list[Taken]:
    """Store all events of one workspace, or none; those whose keys were used by the same requests answer as before.

    For an autocommit connection of the hot pool; several events with keys among them go in one transaction. Raises
    KeyReused with the indexes of events whose keys belong to other requests, in the database or earlier in this batch:
    then nothing is stored.
    """
    firsts, repeats = _settled(batch)
    taken: list[Taken | None] = [None] * len(batch)
    waiting = list(firsts)
    keyed = any(event.claim is not None for event in batch)
    with transaction(connection) if keyed and len(firsts) > 1 else nullcontext():
        for _ in range(_TRIES):
            for index, answer in zip(waiting, ingest(connection, [batch[index] for index in waiting]), strict=True):
                taken[index] = None if answer is None else Taken(answer, replayed=False)
            lost = {index: claim for index in waiting if taken[index] is None and (claim := batch[index].claim)}
            if not lost:
                break
            kept = idempotency.answers(
                connection, lost, workspace_id=batch[0].workspace_id, retention_secs=retention_secs
            )
            for index, answer in kept.items():
                taken[index] = Taken(answer, replayed=True)
            waiting = [index for index in lost if index not in kept]
            if not waiting:
                break
        else:
            raise Unavailable("The idempotency key is being used and given up all the time: try again.")
    for index, first in repeats.items():
        if (made := taken[first]) is not None:
            taken[index] = Taken(made.answer, replayed=True)
    return [one for one in taken if one is not None]


@functools.lru_cache(maxsize=1024)  # producers send few types
def _words(event_type: str) -> str:
    """The patterns that match the type, as the statement takes them."""
    return " ".join(patterns_for(event_type))


def _settled(batch: Sequence[NewEvent]) -> tuple[list[int], dict[int, int]]:
    """Find equal keys within the batch: return the indexes to store, and each repeat's index with that of its first.

    Raises KeyReused with the later indexes where a key comes with different requests.
    """
    by_key: dict[str, int] = {}
    firsts: list[int] = []
    repeats: dict[int, int] = {}
    reused: list[int] = []
    for index, event in enumerate(batch):
        first = index if event.claim is None else by_key.setdefault(event.claim.key, index)
        if first == index:
            firsts.append(index)
        elif batch[first].claim == event.claim:
            repeats[index] = first
        else:
            reused.append(index)
    if reused:
        raise KeyReused(reused)
    return firsts, repeats
