"""gRPC in front of the engine."""

from paceline.server.app import GrpcServer, run_server
from paceline.server.generation import SERVICE_NAME, GenerationService
from paceline.server.settings import ServerSettings

__all__ = ["SERVICE_NAME", "GenerationService", "GrpcServer", "ServerSettings", "run_server"]
