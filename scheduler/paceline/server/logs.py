"""Logs: lines for people or for programs. A prompt, a completion or a credential is in none of them."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final

import grpc

from paceline.server.calls import Call, find_call

TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
HEALTH: Final = "/grpc.health."

access_logger = logging.getLogger("paceline.access")


def configure(log_format: str) -> None:
    """Have everything logged to stderr from INFO on, as "text" or as "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def log_access(call: Call, code: grpc.StatusCode, seconds: float) -> None:
    """An `Observer`: one line for each RPC, at its end. Load balancers ask for health too often to be told of."""
    level = logging.DEBUG if call.method.startswith(HEALTH) else logging.INFO
    if not access_logger.isEnabledFor(level):
        return
    fields: dict[str, Any] = {"code": code.name, "seconds": round(seconds, 6), "caller": call.caller.name}
    text = f"{call.method} {code.name} in {seconds:.3f} s: request {call.request_id}"
    if tenant := _tenant_of(call):
        text += f" of tenant {tenant}"
    if call.tokens is not None:
        text += f", {call.tokens} tokens"
        fields["tokens"] = call.tokens
    access_logger.log(level, "%s", text, extra={"call": call, "fields": fields})


class JsonFormatter(logging.Formatter):
    """One JSON object to a line. Inside an RPC, it says which one."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        call: Call | None = getattr(record, "call", None) or find_call()
        if call is not None:
            entry |= {"request_id": call.request_id, "method": call.method, "tenant": _tenant_of(call)}
            if call.traceparent:
                entry["traceparent"] = call.traceparent
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def _tenant_of(call: Call) -> str:
    """Whose request it is, or else whose credential it came with."""
    return call.tenant or call.caller.tenant or ""
