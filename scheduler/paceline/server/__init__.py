"""gRPC in front of the engine."""

from paceline.compiled import path_of

__path__ = path_of("server", __path__)

from paceline.server.app import GrpcServer, run_server
from paceline.server.generation import SERVICE_NAME, GenerationService
from paceline.server.settings import ServerSettings

__all__ = ["SERVICE_NAME", "GenerationService", "GrpcServer", "ServerSettings", "run_server"]
