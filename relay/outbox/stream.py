"""The Redis Stream: hints that a row may be due. A hint holds a row id and nothing else.

Losing, doubling or reordering hints is normal: the lease on the row decides, and the
reconciler announces again what came to nothing. So entries are deleted once acknowledged,
and the stream is as long as the backlog.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from relay.outbox.broker import client_of

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger(__name__)

#: One consumer group: each hint goes to one worker.
GROUP = "workers"
_FIELD = b"d"

#: Seconds. Redis that does not answer costs a thread at most the first, and a blocking read its block and the first.
ANSWER_TIMEOUT_SECS = 1.5
CONNECT_TIMEOUT_SECS = 1.0

# One call for a thousand entries: a round trip each would cost more than all the rest of announcing.
_ANNOUNCE = """
for i = 1, #ARGV do
    redis.call('XADD', KEYS[1], '*', 'd', ARGV[i])
end
return #ARGV
"""

# In one step, because DELCONSUMER throws away what is pending: a consumer that got an entry meanwhile must stay.
_REMOVE_IDLE = """
local removed = 0
for _, entry in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
    local facts = {}
    for i = 1, #entry, 2 do facts[entry[i]] = entry[i + 1] end
    if facts['pending'] == 0 and facts['idle'] > tonumber(ARGV[2]) then
        redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], facts['name'])
        removed = removed + 1
    end
end
return removed
"""


class Hint(NamedTuple):
    """A stream entry and the delivery that it names."""

    entry: bytes
    delivery_id: UUID


def connect(url: str, *, block_secs: float = 0.0) -> redis.Redis:
    """Make a client with bounded waits and no retries of its own: the callers' loops retry.

    `block_secs` is the longest blocking read it is used for; the socket's time-out is longer than that by construction.
    """
    return client_of(
        url,
        socket_timeout=block_secs + ANSWER_TIMEOUT_SECS,
        socket_connect_timeout=CONNECT_TIMEOUT_SECS,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )


class Stream:
    """The one stream of an installation, seen by one process (as consumer `consumer`)."""

    def __init__(self, client: redis.Redis, *, prefix: str, consumer: str) -> None:
        # As they come: the client's own shaping of each entry costs more than all else here.
        for command in ("XREADGROUP", "XAUTOCLAIM"):
            client.set_response_callback(command, _as_it_comes)
        self._redis: Any = client
        self.key = f"{prefix}:hints"
        self._consumer = consumer
        #: Whether this process has met the group: until then its absence is that of a new installation.
        self._met = False
        self._announce = client.register_script(_ANNOUNCE)
        self._remove_idle = client.register_script(_REMOVE_IDLE)

    def ping(self) -> None:
        """Raise redis.RedisError unless Redis answers."""
        self._redis.ping()

    def try_write(self) -> None:
        """Raise redis.RedisError unless Redis answers and takes writes: one that is full, or a replica, only answers."""
        self._redis.set(f"{self.key}:try", b"", px=1000)

    def announce(self, ids: Sequence[UUID]) -> None:
        """Add a hint for each of `ids`. A time-out leaves open whether they were added: twice does no harm."""
        self._announce(keys=[self.key], args=[id_.bytes for id_ in ids])

    def read(self, count: int, *, block_ms: int) -> list[Hint]:
        """Take up to `count` new hints, waiting up to `block_ms` for the first."""
        return self._read(">", count, block_ms)

    def read_unacknowledged(self, count: int, after: bytes = b"0") -> list[Hint]:
        """Return up to `count` hints that this consumer took after entry `after` and never acknowledged."""
        return self._read(after, count, None)

    def acknowledge(self, entries: Sequence[bytes]) -> None:
        """Settle entries and take them out of the stream, in one round trip."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.xack(self.key, GROUP, *entries)
        pipeline.xdel(self.key, *entries)
        pipeline.execute()

    def reclaim(self, *, idle_ms: int, count: int) -> list[Hint]:
        """Take over up to `count` entries that some consumer read at least `idle_ms` ago and never settled."""
        try:
            answer = self._redis.xautoclaim(
                self.key, GROUP, self._consumer, min_idle_time=idle_ms, start_id="0-0", count=count
            )
        except redis.ResponseError as error:
            self._mend(error)
            return []
        self._met = True
        return self._hints(answer[1])

    def remove_idle_consumers(self, *, idle_ms: int) -> int:
        """Forget consumers that hold nothing and have been silent for `idle_ms`: the names of dead processes."""
        try:
            return int(self._remove_idle(keys=[self.key], args=[GROUP, idle_ms]))
        except redis.ResponseError as error:
            self._mend(error)
            return 0

    def unread_since(self) -> datetime | None:
        """Return the time in the group's last-delivered id while an entry after it waits; None when all was delivered.

        Redis's clock. (XINFO's `lag` will not do: null after an XDEL, wrong after a trim.)
        """
        try:
            groups = self._redis.xinfo_groups(self.key)
        except redis.ResponseError as error:
            self._mend(error)
            return None
        last = next((group["last-delivered-id"] for group in groups if group["name"] == GROUP.encode()), None)
        if last is None:
            self.ensure_group()
            return None
        self._met = True
        if not self._redis.xrange(self.key, min=b"(" + last, max="+", count=1):
            return None
        return datetime.fromtimestamp(int(last.split(b"-")[0]) / 1000, tz=UTC)

    def unread(self) -> int:
        """Return how many entries no consumer has read yet: those in the stream, less those that are read and unsettled."""
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.xlen(self.key)
        pipeline.xpending(self.key, GROUP)
        try:
            length, pending = pipeline.execute()
        except redis.ResponseError as error:
            self._mend(error)
            return self.length()
        self._met = True
        return max(0, int(length) - int(pending["pending"]))

    def length(self) -> int:
        """Return how many entries the stream holds."""
        return int(self._redis.xlen(self.key))

    def ensure_group(self) -> None:
        """Make stream and group where they are missing. From 0, not `$`: what is in the stream is still owed."""
        try:
            self._redis.xgroup_create(self.key, GROUP, id="0", mkstream=True)
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        self._met = True

    def _read(self, start: str | bytes, count: int, block_ms: int | None) -> list[Hint]:
        try:
            answer = self._redis.xreadgroup(GROUP, self._consumer, {self.key: start}, count=count, block=block_ms)
        except redis.ResponseError as error:
            self._mend(error)
            return []
        self._met = True
        return self._hints(answer[0][1]) if answer else []

    def _hints(self, entries: Sequence[tuple[bytes, Sequence[bytes] | None]]) -> list[Hint]:
        """Read entries as Redis writes them: an id, and a flat list of field and value (none: deleted meanwhile)."""
        hints: list[Hint] = []
        strange: list[bytes] = []
        for entry, fields in entries:
            if fields and len(fields) == 2 and fields[0] == _FIELD and len(fields[1]) == 16:
                hints.append(Hint(entry, UUID(bytes=fields[1])))
            else:
                strange.append(entry)
        if strange:
            # From another release, or trimmed away: its row, if any, is announced again by the reconciler.
            log.warning("stream entries of an unknown shape were dropped", extra={"count": len(strange)})
            self.acknowledge(strange)
        return hints

    def _mend(self, error: redis.ResponseError) -> None:
        """After a flush or a delete: make the group again. Any other refusal is the caller's to see."""
        if "NOGROUP" not in str(error) and "no such key" not in str(error):
            raise error
        if self._met or self._redis.exists(self.key):
            log.warning("the stream's consumer group was gone: it is made again", extra={"stream": self.key})
        else:
            log.info("the stream is new: its consumer group is made", extra={"stream": self.key})
        self.ensure_group()


def _as_it_comes(answer: Any, **_options: object) -> Any:
    return answer
