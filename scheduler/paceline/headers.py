"""What clients and server tell each other in HTTP headers, as both ends judge it."""

from __future__ import annotations

import re
from typing import Final

from paceline.errors import InvalidArgument

AUTHORIZATION_KEY: Final = "authorization"
PUSHBACK_KEY: Final = "grpc-retry-pushback-ms"
REQUEST_ID_KEY: Final = "x-request-id"
TRACEPARENT_KEY: Final = "traceparent"
# Of requests, tenants and models. No blanks: they would not survive the trip at either end of a name.
NAME: Final = re.compile(r"[!-~]{1,128}")
# https://www.w3.org/TR/trace-context/#traceparent-header
TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def check_name(field: str, name: object) -> None:
    """Raises InvalidArgument: headers would not carry the name as it is."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidArgument(field, name, "1 to 128 printable ASCII characters without blanks")
