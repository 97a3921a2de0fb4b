"""What receivers are told to verify with, as printed, against what Relay signs: the same requests in each language."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relay.core.model import Signing
from relay.core.secret import Secret, new_secret
from relay.core.signing import public_key_of, signature_headers, signing_key

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "receiving.md").read_text("utf-8")
VECTORS = json.loads((ROOT / "tests" / "vectors" / "signing.json").read_text("utf-8"))["vectors"]

#: Unix seconds by the receiver's clock.
NOW = 1_800_000_000
BODY = b'{"type":"order.paid","note":"\xc3\xa9"}'
ID = "01a22e1b-1183-7c7c-805d-b9d1d74de6f0"
SCHEMES = (Signing.RELAY, Signing.STANDARD, Signing.STANDARD_ED25519)
#: What Node runs: the listings, then each request, by a clock of its own; answered in one line.
HARNESS = """
const run = { relay: verify, standard: verifyStandard, "standard-ed25519": verifyPublic };
const { readFileSync } = require("node:fs");
console.log(JSON.stringify(JSON.parse(readFileSync(0, "utf8")).map((one) => {
  Date.now = () => one.now * 1000;
  try {
    return run[one.scheme](one.with, one.headers, Buffer.from(one.body, "base64"));
  } catch (error) {
    return error.message;
  }
})));
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as a receiver has it, what it verifies with, and whether it should pass."""

    name: str
    scheme: Signing
    with_: Any
    headers: dict[str, str]
    body: bytes = BODY
    now: int = NOW
    passes: bool = False


def jwks(*public_keys: bytes) -> dict[str, Any]:
    """Public keys as a JWK Set."""
    encoded = [base64.urlsafe_b64encode(key).decode().rstrip("=") for key in public_keys]
    return {
        "keys": [{"kty": "OKP", "crv": "Ed25519", "x": x, "kid": "k", "use": "sig", "alg": "EdDSA"} for x in encoded]
    }


def requests_of(scheme: Signing) -> list[Request]:
    """Requests of one scheme: good ones, each thing that can be wrong, and the known answers."""
    mine, old, other = (new_secret(bytes([number]) * 32, scheme) for number in range(3))

    def known(*secrets: Secret) -> Any:
        if scheme is Signing.STANDARD_ED25519:
            return jwks(*(public_key_of(secret) for secret in secrets))
        return secrets[0].reveal()

    def signed(*secrets: Secret, at: int = NOW) -> dict[str, str]:
        keys = [signing_key(scheme, secret) for secret in secrets]
        lines = signature_headers(
            scheme, secrets=keys, delivery_id=ID, event_id=ID, event_type="a.b", attempt=2, timestamp=at, body=BODY
        )
        return {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}

    prefix = "relay" if scheme is Signing.RELAY else "webhook"
    good = signed(mine)
    signature = f"{prefix}-signature"

    def one(name: str, headers: dict[str, str], secret: Secret = mine, **more: Any) -> Request:
        return Request(name=f"{scheme.value}: {name}", scheme=scheme, with_=known(secret), headers=headers, **more)

    made = [
        one("fresh", good, passes=True),
        one("rotated, the receiver has the new one", signed(mine, old), passes=True),
        one("rotated, the receiver has the old one", signed(old, mine), passes=True),
        one("rotated, the receiver has neither", signed(old, other)),
        one("another secret", good, other),
        one("another body", good, body=BODY + b" "),
        one("no body", good, body=b""),
        one("nearly stale", signed(mine, at=NOW - 300), passes=True),
        one("stale", signed(mine, at=NOW - 301)),
        one("from the future", signed(mine, at=NOW + 301)),
        one("another time", {**good, f"{prefix}-timestamp": str(NOW + 1)}),
        one("no headers", {}),
        one("no signature", {name: value for name, value in good.items() if name != signature}),
        one("no time", {name: value for name, value in good.items() if name != f"{prefix}-timestamp"}),
    ]
    made += [
        one(f"the time {text[:9]!r}", {**good, f"{prefix}-timestamp": text})
        for text in ("", "x", "-1", "9" * 5000, "²", f" {NOW}", "1e9")
    ]
    made += [
        one(f"the signature {text!r}", {**good, signature: text})
        for text in (
            "",
            "v1",
            "v1=",
            "v1,",
            "v1a,",
            "v1a,é v1,AAAA x",
            "é,v1=",
            "v1a,AAAA",
            ",, ,",
            good[signature][:-4],
        )
    ]
    if scheme is not Signing.RELAY:
        made.append(one("another id", {**good, "webhook-id": "another"}))
    if scheme is Signing.STANDARD_ED25519:
        both = known(other, mine)
        made.append(Request(name="both keys are known", scheme=scheme, with_=both, headers=good, passes=True))
    else:
        empty = [
            Request(name=f"{scheme.value}: no secret", scheme=scheme, with_=text, headers=good)
            for text in ("", "whsec_")
        ]
        made += empty
    return made + [_known_answer(vector) for vector in VECTORS if vector["scheme"] == scheme.value]


def _known_answer(vector: dict[str, Any]) -> Request:
    scheme = Signing(vector["scheme"])
    prefix = "relay" if scheme is Signing.RELAY else "webhook"
    headers = {f"{prefix}-timestamp": str(vector["timestamp"]), f"{prefix}-signature": vector["signature"]}
    if scheme is not Signing.RELAY:
        headers["webhook-id"] = vector["id"]
    secret = vector.get("secret")
    return Request(
        name=f"known answer {vector['signature']}",
        scheme=scheme,
        with_=secret or jwks(base64.b64decode(vector["public_key"].removeprefix("whpk_"))),
        headers=headers,
        body=bytes.fromhex(vector["body_hex"]),
        now=vector["timestamp"],
        passes=True,
    )


REQUESTS = [request for scheme in SCHEMES for request in requests_of(scheme)]


def listings(language: str) -> list[str]:
    """The page's code in a language, in its order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def as_json() -> str:
    """The requests, for a program in another language."""
    return json.dumps(
        [
            {
                "scheme": one.scheme.value,
                "with": one.with_,
                "headers": one.headers,
                "body": base64.b64encode(one.body).decode(),
                "now": one.now,
            }
            for one in REQUESTS
        ]
    )


def judged(answers: list[Any]) -> list[tuple[str, Any]]:
    """Those that were answered wrongly. A listing may raise where it is given no secret, and nowhere else."""
    told = "the secret must be the whole text, whsec_ included"
    return [
        (one.name, answer)
        for one, answer in zip(REQUESTS, answers, strict=True)
        if answer is not one.passes and not (answer == told and one.name.endswith("no secret"))
    ]


def test_the_listings_in_python() -> None:
    """Each scheme's function takes what is signed and fresh, and refuses the rest, whatever stands in the headers."""
    hmacs, public = ({"__name__": "shown"} for _ in range(2))
    for names, listing in zip((hmacs, public), listings("python"), strict=True):
        exec(compile(listing, "docs/receiving.md", "exec"), names)
    shown: dict[Signing, Any] = {
        Signing.RELAY: hmacs["verify"],
        Signing.STANDARD: hmacs["verify_standard"],
        Signing.STANDARD_ED25519: public["verify"],
    }

    def answer(one: Request) -> Any:
        names = public if one.scheme is Signing.STANDARD_ED25519 else hmacs
        names["time"] = SimpleNamespace(time=lambda: one.now)  # type: ignore[assignment]  # the receiver's clock
        headers = {name.title(): value for name, value in one.headers.items()}
        try:
            return shown[one.scheme](one.with_, headers, one.body)
        except ValueError as error:
            return str(error)

    assert judged([answer(one) for one in REQUESTS]) == []


def test_the_listings_in_node() -> None:
    """The same requests, the same answers."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no `node` on this machine to run the listings with")
    first, second = listings("js")

    done = subprocess.run(
        [node, "-e", first + second + HARNESS],
        input=as_json(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert judged(json.loads(done.stdout)) == []


def test_every_language_has_every_scheme() -> None:
    """Each language has two listings, and the sum of requests is of all schemes, good ones and bad."""
    assert {language: len(listings(language)) for language in ("python", "js", "go", "php")} == dict.fromkeys(
        ("python", "js", "go", "php"), 2
    )
    assert {(one.scheme, one.passes) for one in REQUESTS} == {
        (scheme, passes) for scheme in SCHEMES for passes in (True, False)
    }
