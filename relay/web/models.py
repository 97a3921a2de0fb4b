"""What administrative calls take: one model a call, unknown fields refused, every fault named by its path."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo
from pydantic_core import PydanticCustomError

from relay.core.errors import InvalidInput
from relay.core.numbers import whole
from relay.web.openapi.formats import shown
from relay.web.problems import FieldError, invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from relay.core.address import AddressPolicy
    from relay.core.url import UrlPolicy

#: Also a header's value (Relay-Workspace), hence its letters; never of the form of an id, which would be read as one.
_WORKSPACE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_UUID: Final = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")

#: A whole number, however it is written.
WHOLE: Final = BeforeValidator(whole)

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the settings say about an endpoint's values."""

    url_policy: UrlPolicy
    address_policy: AddressPolicy
    #: Milliseconds: the longest time-out for which a lease leaves room.
    longest_timeout_ms: int
    #: Where messages to a chat platform go, by transport.
    platform_urls: Mapping[str, str]
    #: The endpoint's own, which does not change; None while it is made.
    transport: str | None = None


def parse(model: type[M], value: Mapping[str, Any], limits: Limits | None = None) -> M:
    """Make a model of a decoded JSON object; Problem naming every field at fault, and no value, otherwise."""
    try:
        return model.model_validate(value, context=limits)
    except ValidationError as error:
        # The values stay out of it: among them are secrets.
        faults = error.errors(include_url=False, include_input=False)
    raise invalid([_fault(fault) for fault in faults])


def judged(check: Callable[[Any, Limits, Mapping[str, Any]], T]) -> AfterValidator:
    """Make a validator of a check that raises InvalidInput.

    The check gets the value, the settings' limits (None where the call has none) and, by name, the fields above it that
    are well.
    """

    def run(value: Any, info: ValidationInfo) -> T:
        try:
            return check(value, cast("Limits", info.context), info.data)
        except InvalidInput as error:
            context = {"message": str(error), "field": error.field}
            # The text goes in as a value: were it the template, braces in it would be read.
            raise PydanticCustomError(error.code, "{message}", context) from None

    return AfterValidator(run)


def _check_workspace_name(value: str, _limits: Limits, _beside: Mapping[str, Any]) -> str:
    if not _WORKSPACE_NAME.fullmatch(value) or _UUID.fullmatch(value):
        raise InvalidInput(
            "A workspace's name is 1 to 64 letters, digits, '.', '_' and '-', begins with a letter or digit, and is "
            "not of the form of an id.",
            field="name",
            code="invalid_name",
        )
    return value


class Request(BaseModel):
    """A call's body: unknown members are refused, and nothing is converted."""

    # Strict: "5" is not a number, and 1 is not true.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def without_defaults(schema: dict[str, Any]) -> None:
    """Take the defaults out of a model's schema: of a change that leaves alone what it does not name."""
    for field in schema["properties"].values():
        field.pop("default", None)


class WorkspaceChange(Request):
    """PATCH /v1/workspaces/{id}: the limits, each with null for the installation's."""

    model_config = ConfigDict(json_schema_extra=without_defaults)

    max_endpoints: Annotated[int, Field(ge=0, le=1_000_000), WHOLE] | None = None
    #: Events per second.
    ingest_rate: Annotated[float, Field(ge=0.001, le=1_000_000, allow_inf_nan=False)] | None = None
    max_payload_bytes: Annotated[int, Field(ge=1, le=67_108_864), WHOLE] | None = None


class WorkspaceRequest(WorkspaceChange):
    """POST /v1/workspaces."""

    name: Annotated[
        str,
        judged(_check_workspace_name),
        shown({"type": "string", "pattern": f"^{_WORKSPACE_NAME.pattern}$", "examples": ["billing"]}),
    ]


class KeyRequest(Request):
    """POST /v1/keys."""

    name: Annotated[str, Field(min_length=1, max_length=100)]
    scopes: Annotated[list[Literal["ingest", "read", "write", "admin"]], Field(min_length=1, max_length=4)]


def _fault(fault: Mapping[str, Any]) -> FieldError:
    kind: str = fault["type"]
    context: Mapping[str, Any] = fault.get("ctx", {})
    path = _path(fault["loc"])
    if "message" in context:
        # Core names a place within the value, such as headers.X-Evil, by the field's own name.
        within: str | None = context.get("field")
        inner = within is not None and within.startswith((f"{path}.", f"{path}["))
        return FieldError(field=within if inner and within else path, message=context["message"], code=kind)
    if kind == "extra_forbidden":
        return FieldError(field=path, message="There is no such field: leave it out.", code="unknown_field")
    if kind == "missing":
        return FieldError(field=path, message="The field is missing: send it.", code="required")
    message = str(fault["msg"]).replace("Input should be", "The value must be")
    codes = {"greater_than_equal": "out_of_range", "less_than_equal": "out_of_range", "literal_error": "not_a_choice"}
    if kind in codes:
        return FieldError(field=path, message=f"{message}.", code=codes[kind])
    if kind.endswith(("too_long", "too_short")):
        return FieldError(field=path, message=f"{message}.", code="wrong_length")
    return FieldError(field=path, message=f"{message}.", code="wrong_type")


def _path(location: tuple[str | int, ...]) -> str:
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        else:
            shown = step[:80].encode("ascii", "backslashreplace").decode()
            path += f".{shown}" if path else shown
    return path
