"""The manual against the code: what it shows runs, what it lists is so, and its links lead somewhere."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from relay.cli import config_docs
from relay.config import Settings, variable_of
from relay.core.backoff import DEFAULT_POLICY, wait_seconds
from relay.core.model import Signing
from relay.core.secret import new_secret
from relay.core.signing import signature_headers, signing_key
from relay.testkit import index

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
#: Pages that these tests answer for.
PAGES = tuple(sorted(path.stem for path in DOCS.glob("*.md")))

BODY = b'{"type":"order.paid","amount":4999}'


def page(name: str) -> str:
    """The text of a page."""
    return (DOCS / f"{name}.md").read_text("utf-8")


def code(name: str, language: str) -> str:
    """The first block of code of a page in a language."""
    found = re.search(rf"^```{language}\n(.*?)^```$", page(name), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def verify() -> Any:
    """What receivers are told to verify with, as printed."""
    shown: dict[str, Any] = {}
    exec(compile(code("receiving", "python"), "docs/receiving.md", "exec"), shown)
    return shown["verify"]


def signed(*secrets: str, at: float | None = None) -> dict[str, str]:
    """The headers that Relay signs `BODY` with."""
    lines = signature_headers(
        Signing.RELAY,
        secrets=[signing_key(Signing.RELAY, secret) for secret in secrets],
        delivery_id="01a22e1b-1183-7c7c-805d-b9d1d74de6f0",
        event_id="01a22e1b-1176-7fb6-ad04-358a8c6ce1e9",
        event_type="order.paid",
        attempt=1,
        timestamp=int(time.time() if at is None else at),
        body=BODY,
    )
    return dict(line.split(": ", 1) for line in lines)


SECRET, OTHER = (new_secret(bytes([number]) * 32).reveal() for number in (1, 2))


def test_the_printed_verification_takes_what_relay_signs(verify: Any) -> None:
    """A fresh request passes, with headers in any case and with either of two secrets."""
    assert verify(SECRET, signed(SECRET), BODY)
    assert verify(SECRET, {name.upper(): value for name, value in signed(SECRET).items()}, BODY)
    assert verify(SECRET, signed(OTHER, SECRET), BODY)


def test_the_printed_verification_refuses_the_rest(verify: Any) -> None:
    """Another secret, another body, an old or future time, and odd or missing headers do not pass."""
    headers = signed(SECRET)
    assert not verify(OTHER, headers, BODY)
    assert not verify(SECRET, headers, BODY + b" ")
    assert not verify(SECRET, signed(SECRET, at=time.time() - 302), BODY)
    assert not verify(SECRET, signed(SECRET, at=time.time() + 302), BODY)
    assert not verify(SECRET, headers | {"Relay-Timestamp": "9" * 5000}, BODY)
    assert not verify(SECRET, headers | {"Relay-Signature": "é,v1="}, BODY)
    assert not verify(SECRET, {}, BODY)


def test_receivers_are_told_of_every_header_that_signing_adds() -> None:
    """The page on receiving names each header of the default scheme."""
    text = page("receiving")

    assert [name for name in signed(SECRET) if f"| `{name}` |" not in text] == []


def test_the_test_receiver_is_told_of_as_it_tells_itself() -> None:
    """The page on receiving has the lines of the receiver's own list, in its order."""
    rows = re.findall(r"^\| `((?:[A-Z]+ )?/[^`]*)` \| (.*) \|$", page("receiving"), re.MULTILINE)

    assert rows == list(index.ROUTES + index.OWN)


def test_the_page_of_settings_is_made_from_the_settings() -> None:
    """docs/configuration.md is what `relay config --markdown` prints."""
    assert page("configuration") == config_docs.markdown()


def test_every_setting_is_read_by_something() -> None:
    """No setting is taken and then left alone."""
    sources = [path for path in (ROOT / "relay").rglob("*.py") if path.name not in {"config.py", "config_docs.py"}]
    text = "\n".join(path.read_text("utf-8") for path in sources)
    unread = {
        name
        for name in Settings.model_fields
        if not re.search(rf"\b(settings|given)\.{name}\b|\.get\(\"{variable_of(name)}\"\)", text)
    }

    assert unread == set()


def test_the_table_of_retries_is_the_default_policy() -> None:
    """Each wait, and the earliest and latest time of each attempt, is what the policy gives."""
    expected = [["1", "", "0 s", "0 s"]]
    earliest = latest = 0.0
    for attempt in range(2, DEFAULT_POLICY.max_attempts + 1):
        wait = wait_seconds(DEFAULT_POLICY, attempt - 1, 0.0)
        earliest += wait
        latest += wait * (1 + DEFAULT_POLICY.jitter)
        expected.append([str(attempt), spelled(wait), spelled(earliest), spelled(latest)])

    rows = re.findall(r"^\| (\d+) \|(.*?)\|(.*?)\|(.*?)\|$", page("delivery"), re.MULTILINE)

    assert [[cell.strip() for cell in row] for row in rows] == expected


def spelled(seconds: float) -> str:
    """Seconds as the table has them."""
    whole = round(seconds)
    parts = ((whole // 3600, "h"), (whole // 60 % 60, "min"), (whole % 60, "s"))
    return " ".join(f"{count} {unit}" for count, unit in parts if count)


def test_the_readme_leads_to_every_page() -> None:
    """Its index has each page of the manual, and nothing that is not there."""
    linked = set(re.findall(r"\]\(docs/(\w[\w-]*)\.md\)", (ROOT / "README.md").read_text("utf-8")))

    assert linked == set(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    """A relative link names a file that is there, and a heading of it where it has a fragment."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page(name)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        file = (DOCS / path) if path else DOCS / f"{name}.md"
        if not file.is_file() or (fragment and fragment not in anchors(file.read_text("utf-8"))):
            broken.append(target)

    assert broken == []


def anchors(text: str) -> set[str]:
    """The fragments of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
