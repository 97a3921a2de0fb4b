"""What the tables say of a call, and the words that many calls share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import BaseModel

JSON: Final = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of the query, or a header."""

    name: str
    where: str
    schema: Mapping[str, Any]
    says: str
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page of a list, of rows of this shape."""

    of: type


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A success."""

    says: str
    #: A shape of relay/web/answers.py, or a page of such; None: no body, or another media type's.
    shape: type | Page | None = None
    media_type: str = JSON
    #: Of a body that is not JSON.
    schema: Mapping[str, Any] | None = None
    #: Names of those of `headers.HEADERS` that come with it, always or at times.
    headers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """What a request carries."""

    #: By media type: a model, or a schema.
    content: Mapping[str, type[BaseModel] | Mapping[str, Any]]
    required: bool = True
    says: str = ""
    #: A body by media type, shown and tried.
    examples: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One call."""

    tag: str
    answers: Mapping[int, Answer]
    parameters: tuple[Parameter, ...] = ()
    body: Body | None = None
    #: Codes of problems by status, beside those that follow from its path, its key and its body.
    problems: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    #: Whether it asks the database for anything.
    stored: bool = True


def takes(model: type[BaseModel], example: Any = None, *, required: bool = True) -> Body:
    """A body of JSON that this model judges."""
    return Body(content={JSON: model}, required=required, examples={} if example is None else {JSON: example})
