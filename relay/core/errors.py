"""The one tree of errors, named by what the caller must do about them.

A class's docstring is its default message, so that every error has a sentence.
"""

from __future__ import annotations


class RelayError(Exception):
    """Relay could not do what was asked."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (self.__doc__ or "").strip())


class InvalidInput(RelayError):
    """The input is not valid: correct the named field and try again.

    Raised by everything in `core` that judges a caller's value. `field` is the
    caller's own name for the value (a JSON path or a header's name) where known;
    `code` is a stable word for programs.
    """

    def __init__(self, message: str, *, field: str | None = None, code: str = "invalid") -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class InvalidJson(InvalidInput):
    """The text is not JSON as RFC 8259 has it; `position` is a byte offset, `line` and `column` count from 1."""

    def __init__(self, message: str, *, position: int, line: int, column: int, code: str = "invalid_json") -> None:
        super().__init__(f"{message} at line {line}, column {column} (byte {position})", code=code)
        self.position = position
        self.line = line
        self.column = column


class ConfigurationError(RelayError):
    """The settings contradict each other or the environment: mend them and start again."""


class SchemaMismatch(ConfigurationError):
    """The database's schema does not fit this release: run `relay migrate`, or upgrade Relay."""


class SchemaTooNew(SchemaMismatch):
    """The database's schema is one of later releases: upgrade Relay on this machine."""


class SealedSecretUnreadable(RelayError):
    """A stored secret cannot be decrypted: its master key is missing from RELAY_MASTER_KEYS, or is the wrong one."""


class Unavailable(RelayError):
    """A part that Relay stands on does not answer just now: try again."""
