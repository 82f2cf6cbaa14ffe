"""Load generator for streaming LLM servers: a planned workload, a client per protocol, one report.

The table and the JSON are in `paceline_loadtest.report`, which needs rich; nothing here does.
"""

from paceline_loadtest.clients import Chunk, Client, GrpcClient, RequestFailed, open_client
from paceline_loadtest.metrics import Report, RequestRecord, summarize
from paceline_loadtest.prompts import Prompt, load_prompts, parse_prompts
from paceline_loadtest.runner import run_load
from paceline_loadtest.workload import LoadConfig, PlannedRequest, RequestOptions, Workload, plan

__all__ = [
    "Chunk",
    "Client",
    "GrpcClient",
    "LoadConfig",
    "PlannedRequest",
    "Prompt",
    "Report",
    "RequestFailed",
    "RequestOptions",
    "RequestRecord",
    "Workload",
    "load_prompts",
    "open_client",
    "parse_prompts",
    "plan",
    "run_load",
    "summarize",
]
