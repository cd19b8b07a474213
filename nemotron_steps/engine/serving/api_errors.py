"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}} with the right status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from nemotron_steps.config.names import nearest
from nemotron_steps.environments.http_server import Reply
from nemotron_steps.errors import DataError

Model = TypeVar("Model", bound=BaseModel)


class ApiError(Exception):
    """A request that cannot be answered.

    Args:
        status: HTTP status.
        message: what is wrong.
        param: dotted name of the field that is wrong.
        code: OpenAI's machine-readable reason.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {
            "error": {
                "message": message,
                "type": "invalid_request_error" if status < 500 else "server_error",
                "param": param,
                "code": code,
            }
        }

    def reply(self) -> Reply:
        """As an HTTP answer; a client told to wait is told how long."""
        return Reply(self.status, self.body, (("Retry-After", "1"),) if self.status == 503 else ())


def refused(error: DataError, param: str) -> ApiError:
    """The answer to messages that cannot be read: 400, with the field.

    Args:
        param: the field where the error names none within it.
    """
    field = (error.where or "").partition(" field ")[2].removeprefix("responses_create_params.") or param
    what = error.what.replace("responses_create_params.", "")
    what = what if error.found is None else f"{what}, found {error.found}"
    return ApiError(400, what, param=field.replace("[", ".").replace("]", ""), code="invalid_value")


def parse_body(schema: type[Model], body: Mapping[str, Any]) -> Model:
    """A request body as its model. A field that is null counts as absent, as in OpenAI's API.

    Raises:
        ApiError: 400, naming the first field that is wrong.
    """
    try:
        return schema.model_validate({name: value for name, value in body.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        param = ".".join(str(part) for part in first["loc"]) or None
        if first["type"] == "extra_forbidden" and param is not None:
            close = nearest(param, schema.model_fields)
            guess = f"; did you mean {' or '.join(close)}?" if close else ""
            raise ApiError(
                400, f"this endpoint does not support `{param}`{guess}", param=param, code="unsupported_parameter"
            ) from error
        message = first["msg"].removeprefix("Value error, ")
        raise ApiError(400, f"{param}: {message}" if param else message, param=param, code="invalid_value") from error
