"""Whatever makes a delivery pending, or moves its due time, takes its mark and its lease's token away in the same write.

A row that is marked as announced and was not, or not for its new time, would wait for the reconciler (B-21).
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

STORE = Path(__file__).resolve().parents[2] / "relay" / "store"

#: What a SET clause may say of the status that makes no row pending: any other status as a constant.
_NOT_PENDING = re.compile(r"^[1-4]$")


def _texts() -> list[tuple[str, str]]:
    """Every string of the store's modules, with the module's name; the parts of f-strings joined."""
    found = []
    for path in sorted(STORE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "?" for part in node.values]
                found.append((path.name, "".join(str(part) for part in parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append((path.name, node.value))
    return found


def _updates(text: str) -> list[dict[str, str]]:
    """The SET clauses of a text's updates of deliveries: column to value."""
    found = []
    text = re.sub(r"--.*", "", text)
    for match in re.finditer(r"\bupdate\s+relay\.deliveries\b[^;]*?\bset\b", text, re.IGNORECASE):
        assigned: dict[str, str] = {}
        depth, start, rest = 0, 0, text[match.end() :]
        clause = rest
        for token in re.finditer(r"[()]|\bcase\b|\bend\b|,|\bfrom\b|\bwhere\b|\breturning\b", rest, re.IGNORECASE):
            word = token[0].lower()
            if word in {"(", "case"}:
                depth += 1
            elif word in {")", "end"}:
                depth -= 1
            if depth < 0 or (depth == 0 and word in {"from", "where", "returning"}):
                clause = rest[: token.start()]
                break
        depth = 0
        for token in re.finditer(r"[()]|\bcase\b|\bend\b|,|$", clause, re.IGNORECASE):
            word = token[0].lower()
            depth += (word in {"(", "case"}) - (word in {")", "end"})
            if depth == 0 and word in {",", ""}:
                name, _, value = clause[start : token.start()].partition("=")
                if value:
                    assigned[name.strip()] = " ".join(value.split())
                start = token.end()
        found.append(assigned)
    return found


def _fault(assigned: dict[str, str]) -> str | None:
    """What a SET clause lacks, if anything."""
    status = assigned.get("status")
    if (status is None or _NOT_PENDING.match(status)) and "due_at" not in assigned:
        return None
    missing = [name for name in ("announced_at", "lease_token") if assigned.get(name) != "null"]
    return f"sets {sorted(assigned)} and not {missing} to null" if missing else None


def test_every_such_write_clears_both() -> None:
    """B-21, over every update of deliveries in the store."""
    updates = [(module, assigned) for module, text in _texts() for assigned in _updates(text)]
    # Marking, claiming, recording, giving back, replaying and more: were they not found, nothing would be looked at.
    assert len(updates) >= 8
    assert [(module, fault) for module, assigned in updates if (fault := _fault(assigned)) is not None] == []


@pytest.mark.parametrize(
    ("statement", "at_fault"),
    [
        ("update relay.deliveries set due_at = now()", True),
        ("update relay.deliveries d set status = 0, announced_at = null where d.id = 1", True),
        ("update relay.deliveries set status = r.next, lease_token = null from r", True),
        ("update relay.deliveries set status = 0, lease_token = null, announced_at = null", False),
        ("update relay.deliveries set due_at = case when a = 0 then now() else b end, announced_at = null", True),
        ("update relay.deliveries set status = %(status)s, announced_at = null, lease_token = null", False),
        ("update relay.deliveries set status = 4, finished_at = now()", False),
        ("update relay.deliveries set announced_at = now() from due", False),
        ("(update relay.deliveries set due_at = f(a, b)) select lease_token = null, announced_at = null", True),
    ],
)
def test_the_look_tells_right_from_wrong(statement: str, at_fault: bool) -> None:
    """The look itself: what it must find, and what it must leave alone."""
    [assigned] = _updates(statement)
    assert (_fault(assigned) is not None) is at_fault
