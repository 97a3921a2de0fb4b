"""Jobs on the send path: each goes to a URL of its own, by the rate and the caps of its origin's endpoint (B-111)."""

from __future__ import annotations

import base64
import dataclasses
import logging
from typing import TYPE_CHECKING

from relay.core.backoff import JOB_POLICY
from relay.core.errors import InvalidInput, SealedSecretUnreadable
from relay.core.headers import curl_header
from relay.core.model import Signing
from relay.core.signing import signing_key
from relay.store import jobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    import sqlalchemy as sa

    from relay.delivery.destinations import Destination
    from relay.delivery.gate import Leased
    from relay.store.jobs import JobRow
    from relay.store.vault import Vault

log = logging.getLogger(__name__)

#: Each keeps libcurl from adding a header of its own, where the job has none of that name: a job is sent as it was
#: built, with nothing of the HTTP client's but Host and Content-Length (B-112).
_REMOVALS = {"user-agent": "User-Agent:", "accept": "Accept:", "expect": "Expect:", "content-type": "Content-Type:"}


class JobDestinations:
    """Finds out where jobs go and with what."""

    def __init__(self, vault: Vault, *, timeout_ms: int, longest_timeout_ms: int) -> None:
        """Take the vault that opens header values and secrets.

        `timeout_ms` is for jobs that have none of their own; a job that asks for more than `longest_timeout_ms`, which
        is what the lease leaves room for, gets that.
        """
        self._vault = vault
        self._timeout_ms = timeout_ms
        self._longest_timeout_ms = longest_timeout_ms

    def divert(self, connection: sa.Connection, batch: Sequence[Leased]) -> None:
        """Put each job's own destination in its origin's place; pass over what is no job. One statement for all."""
        rows = jobs.load(connection, [leased.row.id for leased in batch])
        for leased in batch:
            row = rows.get(leased.row.id)
            if row is not None:
                leased.job = True
                leased.destination = self._destination(row, leased.destination, leased.row.content_type)

    def _destination(self, row: JobRow, origin: Destination, content_type: str) -> Destination:
        signing = Signing.NONE
        key = previous_key = None
        headers: list[tuple[str, str]] = []
        fault = None
        try:
            signing = Signing(row.signing)
            if signing is not Signing.NONE:
                if row.secret is None:
                    raise SealedSecretUnreadable("the workspace has no job secret")
                key = signing_key(signing, self._vault.open(row.secret, owner=row.workspace_id))
                if row.previous_secret is not None:
                    previous_key = signing_key(signing, self._vault.open(row.previous_secret, owner=row.workspace_id))
            headers = [(name, self._value(row, value)) for name, value in row.headers]
        except (SealedSecretUnreadable, InvalidInput, ValueError) as error:
            # ValueError: what another release, or a hand, has written. One row must not cost its neighbours theirs.
            fault = str(error)
            log.error(
                "a job cannot be sent from here; it waits", extra={"job_id": str(row.delivery_id), "error": fault}
            )
        names = {name.lower() for name, _ in headers}
        if content_type and "content-type" not in names:
            headers.append(("Content-Type", content_type))
            names.add("content-type")
        removals = [line for name, line in _REMOVALS.items() if name not in names]
        return dataclasses.replace(
            origin,
            url=row.url,
            signing=signing,
            key=key,
            previous_key=previous_key,
            previous_key_until=row.previous_secret_expires_at or 0.0,
            header_lines=(*removals, *(curl_header(name, value) for name, value in headers)),
            says_content_type=True,
            timeout_ms=min(row.timeout_ms or self._timeout_ms, self._longest_timeout_ms),
            retry=dataclasses.replace(JOB_POLICY, max_attempts=row.max_attempts),
            fault=fault,
        )

    def _value(self, row: JobRow, stored: str) -> str:
        if not row.headers_sealed:
            return stored
        return self._vault.open(base64.b64decode(stored), owner=row.delivery_id).reveal()
