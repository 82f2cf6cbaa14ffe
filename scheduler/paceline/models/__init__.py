"""Models: one configurable decoder, the table of families, and the safetensors loader."""

from paceline.models.config import ModelConfig, load_model_config
from paceline.models.decoder import Decoder
from paceline.models.loader import load_model

__all__ = ["Decoder", "ModelConfig", "load_model", "load_model_config"]
