"""What `relay doctor` says of a database that is not as it should be: each fault once, with what helps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relay.cli.doctor_database import look
from relay.cli.findings import Verdict
from relay.config_sources import load_settings
from relay.store import schema
from tests.rows import Rows

if TYPE_CHECKING:
    from relay.cli.findings import Finding


def _faults(database: str) -> dict[str, Finding]:
    """What fails in the database itself, by its check; each once. Nobody is at work here, which is no matter."""
    settings = load_settings({"DATABASE_URL": database})
    found = [one for one in look(settings, []) if one.verdict is Verdict.FAIL]
    faults = {one.check: one for one in found if one.check not in {"worker", "publisher", "beat"}}
    assert len(faults) == len([one for one in found if one.check in faults])
    return faults


def test_each_fault_is_told_once_with_what_helps(database: str) -> None:
    """Commits that are not durable; a schema of a release before, which is migrated, and of one after, which is not."""
    with Rows(database) as rows:
        assert _faults(database) == {}
        rows.sql("update relay.schema_info set version = %s", [schema.SCHEMA_VERSION - 1])
        assert "`relay migrate`" in _faults(database)["schema"].remedy
        new = schema.SCHEMA_VERSION + 1
        rows.sql("update relay.schema_info set version = %s, oldest_supported = %s", [new, new])
        assert "do not migrate" in _faults(database)["schema"].remedy
        rows.sql("update relay.schema_info set version = %s, oldest_supported = 1", [schema.SCHEMA_VERSION])
        name = rows.value("select current_database()")
        rows.connection.execute(f"alter database {name} set synchronous_commit = off")
    assert set(_faults(database)) == {"durability"}
