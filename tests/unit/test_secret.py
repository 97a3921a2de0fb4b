"""Secrets: every way of showing one by accident is closed."""

from __future__ import annotations

import base64
import copy
import dataclasses
import json
import logging
import pickle
import string
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.core.errors import InvalidInput
from relay.core.model import Signing
from relay.core.secret import MAX_BYTES, MIN_BYTES, RANDOM_BYTES, Secret, check_secret, new_secret

TEXT = "whsec_bWFya2VyLW1hcmtlci1tYXJrZXItbWFya2Vy"


@dataclasses.dataclass
class _Holder:
    secret: Secret


def test_no_form_shows_it(caplog: pytest.LogCaptureFixture) -> None:
    """Neither str, repr, formats, logs, tracebacks nor a dataclass's repr hold the text (B-95)."""
    secret = Secret(TEXT)
    logging.getLogger("test").warning("%s %r", secret, [secret])
    try:
        raise ValueError(secret)
    except ValueError:
        trace = traceback.format_exc()
    shown = [
        str(secret),
        repr(secret),
        f"{secret} {secret!r} {secret!s} {secret:>20} {secret:d}",
        "%s" % secret,  # noqa: UP031  # this way of formatting is what is tried
        string.Template("$s").substitute(s=secret),
        repr({"a": [secret]}),
        repr(_Holder(secret)),
        trace,
        caplog.text,
        json.dumps({"a": secret}, default=str),
        ascii(secret),
    ]
    assert not [text for text in shown if TEXT in text]
    assert secret.reveal() == TEXT


def test_it_is_not_copied_or_serialised() -> None:
    """Pickle, copy, deepcopy, asdict and JSON all fail on it."""
    secret = Secret(TEXT)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError):
            pickle.dumps(secret, protocol)
    for attempt in (copy.copy, copy.deepcopy, json.dumps, vars):
        with pytest.raises(TypeError):
            attempt(secret)
    with pytest.raises(TypeError):
        dataclasses.asdict(_Holder(secret))


def test_equality_and_hash() -> None:
    """It equals a secret of the same text, never a str, and has no hash."""
    assert Secret(TEXT) == Secret(TEXT)
    assert Secret(TEXT) != Secret(TEXT + "x")
    assert Secret("é\ud800") == Secret("é\ud800")
    assert Secret(TEXT) != TEXT
    with pytest.raises(TypeError):
        hash(Secret(TEXT))


@given(st.binary(min_size=RANDOM_BYTES, max_size=RANDOM_BYTES))
def test_a_new_secret_is_one_that_a_caller_could_give(random: bytes) -> None:
    """A made secret has the right form and holds the random bytes."""
    secret = new_secret(random)
    assert check_secret(secret.reveal()) == secret
    assert base64.b64decode(secret.reveal().removeprefix("whsec_")) == random


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_new_secret_needs_its_bytes(size: int) -> None:
    """The wrong number of random bytes is a mistake of the program."""
    with pytest.raises(ValueError, match="32 random bytes"):
        new_secret(bytes(size))


@pytest.mark.parametrize("size", [MIN_BYTES, 32, 33, MAX_BYTES])
def test_sizes_that_pass(size: int) -> None:
    """24 to 64 bytes pass, whatever their padding."""
    check_secret("whsec_" + base64.b64encode(b"\xfb" * size).decode())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "whsec_",
        "whsec_demo",
        "whsec_" + base64.b64encode(b"x" * 23).decode(),
        "whsec_" + base64.b64encode(b"x" * 65).decode(),
        "WHSEC_" + base64.b64encode(b"x" * 32).decode(),
        "whsk_" + base64.b64encode(b"x" * 32).decode(),
        base64.b64encode(b"x" * 32).decode(),
        "whsec_" + base64.b64encode(b"x" * 32).decode().rstrip("="),
        "whsec_" + base64.b64encode(b"x" * 32).decode() + "\n",
        "whsec_" + base64.urlsafe_b64encode(b"\xfb" * 33).decode(),
        "whsec_" + base64.b64encode(b"x" * 31).decode()[:-2] + "B=",
        "whsec_" + "é" * 40,
        "whsec_\ud800",
        None,
        7,
    ],
)
def test_other_forms_are_refused_without_being_shown(text: object) -> None:
    """Anything but whsec_ and canonical base64 of the right size is refused, and not repeated in the error."""
    with pytest.raises(InvalidInput) as refused:
        check_secret(text, "secret")
    assert (refused.value.field, refused.value.code) == ("secret", "invalid_secret")
    assert not (isinstance(text, str) and len(text) > 10 and text in str(refused.value))


@given(st.binary(min_size=RANDOM_BYTES, max_size=RANDOM_BYTES))
def test_a_new_key_pair_is_one_that_a_caller_could_give(random: bytes) -> None:
    """A made ed25519 secret is whsk_ and the base64 of the seed and its public key (B-92)."""
    secret = new_secret(random, Signing.STANDARD_ED25519)
    assert check_secret(secret.reveal(), signing=Signing.STANDARD_ED25519) == secret
    pair = base64.b64decode(secret.reveal().removeprefix("whsk_"))
    assert (pair[:32], len(pair)) == (random, 64)


PAIR = new_secret(b"k" * 32, Signing.STANDARD_ED25519).reveal()


@pytest.mark.parametrize(
    "text",
    [
        "whsk_",
        TEXT,
        PAIR.removeprefix("whsk_"),
        "whsec_" + PAIR.removeprefix("whsk_"),
        PAIR.rstrip("="),
        PAIR + "\n",
        # The seed alone, and another one's public half.
        "whsk_" + base64.b64encode(b"k" * 32).decode(),
        "whsk_" + base64.b64encode(b"j" * 32 + base64.b64decode(PAIR.removeprefix("whsk_"))[32:]).decode(),
        None,
        7,
    ],
)
def test_other_forms_of_key_pairs_are_refused_without_being_shown(text: object) -> None:
    """Anything but whsk_ and the canonical base64 of a seed and its own public key is refused, and not repeated."""
    with pytest.raises(InvalidInput) as refused:
        check_secret(text, "secret", Signing.STANDARD_ED25519)
    assert (refused.value.field, refused.value.code) == ("secret", "invalid_secret")
    assert not (isinstance(text, str) and len(text) > 10 and text in str(refused.value))
