"""What several roles make of the settings: the vault, and the rules for addresses and URLs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relay.core.address import AddressPolicy
from relay.core.errors import ConfigurationError, InvalidInput
from relay.core.url import UrlPolicy, normalise_url
from relay.store.vault import Vault

if TYPE_CHECKING:
    from collections.abc import Mapping

    from relay.config import Settings


def held_keys(settings: Settings) -> dict[str, object]:
    """Return the master keys that a process holds, by id and fingerprint, the sealing one first: for `relay keys rotate`."""
    return {"master_keys": [[key.id, key.fingerprint] for key in settings.master_keys]}


def make_vault(settings: Settings) -> Vault:
    """Return the vault over RELAY_MASTER_KEYS."""
    return Vault({key.id: key.key.get_secret_value() for key in settings.master_keys})


def make_url_policy(settings: Settings) -> UrlPolicy:
    """Return the rules for URLs."""
    return UrlPolicy(
        require_https=bool(settings.require_https),
        allowed_ports=settings.allowed_ports,
        allow_private=settings.allow_private_endpoints,
        allowed_hosts=settings.allowed_hosts,
    )


def make_platform_urls(settings: Settings) -> Mapping[str, str]:
    """Return where each chat transport's platform is, normalised and without a slash at the end.

    Raises ConfigurationError for what is no URL; the rules for URLs judge what is built on it, for each endpoint.
    """
    free = UrlPolicy(require_https=False, allowed_ports=None, allow_private=True)
    given = {"telegram": settings.telegram_url, "discord": settings.discord_url, "slack": settings.slack_url}
    try:
        return {name: normalise_url(text, free, field=name).text.removesuffix("/") for name, text in given.items()}
    except InvalidInput as error:
        raise ConfigurationError(f"RELAY_{str(error.field).upper()}_URL: {error}") from error


def make_address_policy(settings: Settings) -> AddressPolicy:
    """Return the rules for addresses."""
    return AddressPolicy(
        allow_private=settings.allow_private_endpoints,
        allowed_cidrs=tuple(str(network) for network in settings.allowed_cidrs),
        denied_cidrs=tuple(str(network) for network in settings.denied_cidrs),
    )
