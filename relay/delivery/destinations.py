"""Endpoints as the sender wants them: parsed, opened and kept until their row's version moves.

The claim brings each row's current version, so a kept one is never stale: a change of the
endpoint acts on the next claim.
"""

from __future__ import annotations

import base64
import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relay import __version__
from relay.core.backoff import DEFAULT_POLICY, RetryPolicy, parse_retry
from relay.core.errors import InvalidInput, SealedSecretUnreadable
from relay.core.headers import curl_header
from relay.core.model import Signing
from relay.core.signing import signing_key
from relay.delivery.chat import make_chat
from relay.store import destinations as rows

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    import sqlalchemy as sa

    from relay.delivery.chat import Chat
    from relay.store.destinations import DestinationRow
    from relay.store.vault import Vault

log = logging.getLogger(__name__)

#: By name in lower case. The empty ones keep libcurl from adding its own.
_OUR_LINES = {"user-agent": f"User-Agent: Relay/{__version__}", "accept": "Accept:", "expect": "Expect:"}

#: Endpoints kept; the oldest go first. About 2 KB each.
KEPT = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """One version of one endpoint, ready to send to."""

    id: UUID
    version: int
    url: str
    signing: Signing
    #: What the newest secret's HMAC is keyed with; None for an unsigned endpoint.
    key: bytes | None
    previous_key: bytes | None
    #: Unix seconds, by the database's clock.
    previous_key_until: float
    #: Lines that every request to it begins with: its own headers, and ours where it has none of that name.
    header_lines: tuple[str, ...]
    #: Whether its own headers say the Content-Type; otherwise the event's goes out.
    says_content_type: bool
    certificate: bytes | None
    private_key: bytes | None
    timeout_ms: int
    rate_per_second: float
    burst: int
    max_in_flight: int
    retry: RetryPolicy
    #: Why nothing can be sent to it from this process: a secret that does not open.
    fault: str | None = None
    #: Of a chat endpoint: what makes its messages, and knows where they really go. `url` is for showing then.
    chat: Chat | None = None

    def keys(self, now: float) -> list[bytes]:
        """Return the keys that sign at `now` (Unix seconds, the database's clock), newest first."""
        keys = [] if self.key is None else [self.key]
        if self.previous_key is not None and now < self.previous_key_until:
            keys.append(self.previous_key)
        return keys


class Destinations:
    """The endpoints that this process sends to."""

    def __init__(
        self,
        vault: Vault,
        *,
        platform_urls: Mapping[str, str],
        timeout_ms: int,
        max_in_flight: int,
    ) -> None:
        """Take the vault that opens secrets, and defaults of endpoints that do not say themselves.

        `platform_urls` say, by transport, where a chat platform is.
        """
        self._vault = vault
        self._platform_urls = platform_urls
        self._timeout_ms = timeout_ms
        self._max_in_flight = max_in_flight
        # By the ids' numbers: a UUID's own hash is Python, and this is asked for every delivery.
        self._kept: OrderedDict[tuple[int, int], Destination] = OrderedDict()

    def find(
        self, connection: sa.Connection, wanted: Mapping[tuple[int, int], UUID]
    ) -> dict[tuple[int, int], Destination]:
        """Return the destination for each (endpoint id as a number, version). One statement for all that are not kept.

        Where a row has moved on since, its newer version stands in.
        """
        found: dict[tuple[int, int], Destination] = {}
        missing: dict[tuple[int, int], UUID] = {}
        for key, endpoint_id in wanted.items():
            kept = self._kept.get(key)
            if kept is None:
                missing[key] = endpoint_id
            else:
                found[key] = kept
        if missing:
            loaded = {row.id: self._build(row) for row in rows.load(connection, list(missing.values()))}
            for key, endpoint_id in missing.items():
                destination = loaded[endpoint_id]
                found[key] = destination
                self._kept[(destination.id.int, destination.version)] = destination
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return found

    def _build(self, row: DestinationRow) -> Destination:
        if row.deleted:
            # The gate ends its rows before anything is made of them.
            row = row._replace(transport="http", signing=Signing.NONE, headers={}, certificate_key=None)
        signing, retry = Signing.NONE, DEFAULT_POLICY
        key = previous_key = private_key = None
        header_lines: tuple[str, ...] = ()
        fault = chat = None
        try:
            if row.transport != "http":
                chat = self._chat(row)
            signing, retry = Signing(row.signing), parse_retry(row.retry)
            if signing is not Signing.NONE:
                if row.secret is None:
                    raise SealedSecretUnreadable("the endpoint signs but has no secret")
                key = signing_key(signing, self._vault.open(row.secret, owner=row.id))
                if row.previous_secret is not None:
                    previous_key = signing_key(signing, self._vault.open(row.previous_secret, owner=row.id))
            header_lines = tuple(
                curl_header(name, self._vault.open(base64.b64decode(sealed), owner=row.id).reveal())
                for name, sealed in row.headers.items()
            )
            if row.certificate_key is not None:
                private_key = self._vault.open(row.certificate_key, owner=row.id).reveal().encode()
        except (SealedSecretUnreadable, InvalidInput, ValueError) as error:
            # ValueError: what another release, or a hand, has written. One row must not cost its neighbours theirs.
            fault = str(error)
            log.error(
                "an endpoint cannot be sent to from here; its deliveries wait",
                extra={"endpoint_id": str(row.id), "error": fault},
            )
        names = {name.lower() for name in row.headers}
        ours = tuple(line for name, line in _OUR_LINES.items() if name not in names)
        return Destination(
            id=row.id,
            version=row.version,
            url=row.url if chat is None else chat.display_url,
            signing=signing,
            key=key,
            previous_key=previous_key,
            previous_key_until=row.previous_secret_expires_at or 0.0,
            header_lines=(*ours, *header_lines),
            says_content_type="content-type" in names,
            certificate=None if row.certificate is None else row.certificate.encode(),
            private_key=private_key,
            timeout_ms=row.timeout_ms or self._timeout_ms,
            rate_per_second=row.rate_per_second,
            burst=row.burst,
            max_in_flight=row.max_in_flight or self._max_in_flight,
            retry=retry,
            fault=fault,
            chat=chat,
        )

    def _chat(self, row: DestinationRow) -> Chat:
        if row.secret is None:
            raise SealedSecretUnreadable("the endpoint has no token to send with")
        return make_chat(
            row.transport,
            address=row.url,
            secret=self._vault.open(row.secret, owner=row.id),
            platform_urls=self._platform_urls,
        )
