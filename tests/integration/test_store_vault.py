"""Secrets at rest (B-94, B-95)."""

from __future__ import annotations

import logging
from uuid import uuid4

import pytest

from relay.core.errors import SealedSecretUnreadable, Unavailable
from relay.core.secret import Secret
from relay.store.vault import Vault

MARKER = "whsec_bWFya2VyLW1hcmtlci1tYXJrZXItbWFya2VyLWE="
OLD, NEW = b"o" * 32, b"n" * 32


def test_what_was_sealed_opens_for_its_owner() -> None:
    """A sealed secret opens, for the row that it was sealed for, and never looks the same twice."""
    vault, owner = Vault({"k1": OLD}), uuid4()
    sealed = vault.seal(Secret(MARKER), owner=owner)

    assert vault.open(sealed, owner=owner) == Secret(MARKER)
    assert sealed != vault.seal(Secret(MARKER), owner=owner)
    assert MARKER.encode() not in sealed


def test_another_owner_is_refused() -> None:
    """A ciphertext that was moved to another row does not open there."""
    vault = Vault({"k1": OLD})
    sealed = vault.seal(Secret(MARKER), owner=uuid4())

    with pytest.raises(SealedSecretUnreadable):
        vault.open(sealed, owner=uuid4())


def test_the_first_key_seals_and_every_key_opens() -> None:
    """After a new key was put first, old ciphertexts still open and new ones carry the new key's id."""
    owner = uuid4()
    sealed_before = Vault({"old": OLD}).seal(Secret(MARKER), owner=owner)
    both = Vault({"new": NEW, "old": OLD})

    assert both.key_ids == ["new", "old"]
    assert both.open(sealed_before, owner=owner) == Secret(MARKER)
    assert Vault({"new": NEW}).open(both.seal(Secret(MARKER), owner=owner), owner=owner) == Secret(MARKER)


def test_unknown_key_is_named() -> None:
    """Without the key that sealed it, opening names that key's id."""
    owner = uuid4()
    sealed = Vault({"lost-key": OLD}).seal(Secret(MARKER), owner=owner)

    with pytest.raises(SealedSecretUnreadable, match="lost-key"):
        Vault({"other": OLD}).open(sealed, owner=owner)


def test_wrong_key_under_a_known_id_is_told_apart() -> None:
    """A key of the same id with another value is said to have another value."""
    owner = uuid4()
    sealed = Vault({"k1": OLD}).seal(Secret(MARKER), owner=owner)

    with pytest.raises(SealedSecretUnreadable, match="another value"):
        Vault({"k1": NEW}).open(sealed, owner=owner)


@pytest.mark.parametrize("damaged", [b"", b"\x02k", b"\xff" * 40, b"\x02k1", b"\x02k1" + b"x" * 12])
def test_damaged_ciphertext_is_unreadable_and_nothing_else(damaged: bytes) -> None:
    """Whatever bytes stand in the column, the error is the one that the callers know."""
    with pytest.raises(SealedSecretUnreadable):
        Vault({"k1": OLD}).open(damaged, owner=uuid4())


def test_every_flipped_bit_is_noticed() -> None:
    """A ciphertext with any one bit changed does not open."""
    vault, owner = Vault({"k1": OLD}), uuid4()
    sealed = vault.seal(Secret("whsec_short"), owner=owner)

    for place in range(len(sealed)):
        changed = bytearray(sealed)
        changed[place] ^= 1
        with pytest.raises(SealedSecretUnreadable):
            vault.open(bytes(changed), owner=owner)


def test_no_key_seals_nothing() -> None:
    """A process without master keys says which setting is missing."""
    with pytest.raises(Unavailable, match="RELAY_MASTER_KEYS"):
        Vault({}).seal(Secret(MARKER), owner=uuid4())


def test_nothing_of_a_vault_can_be_printed(caplog: pytest.LogCaptureFixture) -> None:
    """Neither keys nor secrets appear in a vault's text, its errors or a log of either."""
    vault, owner = Vault({"k1": OLD}), uuid4()
    sealed = vault.seal(Secret(MARKER), owner=owner)
    with pytest.raises(SealedSecretUnreadable) as caught:
        vault.open(sealed, owner=uuid4())
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("test").error(
            "%s %r %s", vault, vault.open(sealed, owner=owner), caught.value, exc_info=caught.value
        )

    said = f"{vault!r} {vault} {caught.value!r} {caplog.text}"
    assert MARKER not in said
    assert OLD.decode() not in said
    assert sealed.hex() not in said
