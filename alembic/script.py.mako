"""${message}

The code of the release before must run on this schema: add, never rename or drop what it reads. A migration that
takes something away comes a release later and raises schema_info.oldest_supported; each raises schema_info.version.

Revision ID: ${up_revision}
Revises: ${down_revision | comma,n}
"""

from __future__ import annotations

from alembic import op

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None


def upgrade() -> None:
    """${message}"""
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    """Undo it."""
    ${downgrades if downgrades else "pass"}
