"""The API's own description as a judge: every answer that a test gets is held to what /openapi.json says of it."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any, Final

import jsonschema_rs
from flask.testing import FlaskClient
from werkzeug.exceptions import HTTPException

if TYPE_CHECKING:
    from collections.abc import Mapping

    from werkzeug.test import TestResponse

#: What becomes of requests to no call: they have no answers of their own.
_NOWHERE: Final = {404: {"not_found"}, 405: {"method_not_allowed"}}
_KNOWN: list[str] = []


class DescribedClient(FlaskClient):
    """A client that fails where an answer is not as described: its status, its headers, its type and its content."""

    def open(self, *args: Any, **kwargs: Any) -> TestResponse:
        """Send a request, as the client does that this one is made of."""
        response = super().open(*args, **kwargs)
        path, method = response.request.path, response.request.method
        if response.status_code < 500 or response.get_json(silent=True) is not None:
            judge(_text(self), self._pattern(path, method), method, response)
        return response

    def _pattern(self, path: str, method: str) -> str | None:
        """Return the path of the description that a path is one of; None for no call's."""
        try:
            rule, _ = self.application.url_map.bind("localhost").match(path, method, return_rule=True)
        except HTTPException:
            return None
        return str(rule.rule).replace("<", "{").replace(">", "}")


def judge(text: str, pattern: str | None, method: str, response: TestResponse) -> None:
    """Fail where the answer is none that a call has."""
    document = _document(text)
    told = f"{method} {pattern or response.request.path}: {response.status_code} {response.data[:500]!r}"
    if pattern is None:
        assert response.get_json()["code"] in _NOWHERE[response.status_code], f"not a call's answer: {told}"
        return
    operation = document["paths"][pattern]["get" if method == "HEAD" else method.lower()]
    answer = operation["responses"].get(str(response.status_code))
    assert answer is not None, f"an answer that is not described: {told}"
    answer = _followed(document, answer)
    for name, header in answer.get("headers", {}).items():
        rule = _followed(document, header)
        value = response.headers.get(name)
        if value is None:
            assert not rule.get("required"), f"without its header {name}: {told}"
        else:
            _validator(text, json.dumps(rule["schema"])).validate(value)
    if "content" not in answer or method == "HEAD":
        assert response.data == b"", f"a body where none is described: {told}"
        return
    ((media_type, content),) = answer["content"].items()
    assert response.content_type == media_type, f"as {response.content_type}: {told}"
    if "json" in media_type:
        errors = list(_validator(text, json.dumps(content["schema"])).iter_errors(response.get_json()))
        assert not errors, f"{errors[0]}: {told}"


def _text(client: FlaskClient) -> str:
    """Return the description: every app of a checkout has the same, so the first one's stands for all."""
    if not _KNOWN:
        _KNOWN.append(FlaskClient(client.application, client.response_wrapper).get("/openapi.json").text)
    return _KNOWN[0]


@functools.cache
def _document(text: str) -> dict[str, Any]:
    return dict(json.loads(text))


@functools.cache
def _validator(text: str, schema: str) -> Any:
    components = {"components": {"schemas": _document(text)["components"]["schemas"]}}
    return jsonschema_rs.Draft202012Validator({**json.loads(schema), **components}, validate_formats=True)


def _followed(document: Mapping[str, Any], one: Mapping[str, Any]) -> Mapping[str, Any]:
    ref = one.get("$ref")
    if ref is None:
        return one
    _, _, kind, name = ref.split("/", 3)
    found: Mapping[str, Any] = document["components"][kind][name]
    return found
