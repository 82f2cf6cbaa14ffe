"""Models: one configurable decoder, the table of families, and the safetensors loader."""

from paceline.models.config import ModelConfig, load_model_config
from paceline.models.decoder import Decoder
from paceline.models.loader import load_model, load_native
from paceline.models.model import Model
from paceline.models.native import NativeDecoder

__all__ = ["Decoder", "Model", "ModelConfig", "NativeDecoder", "load_model", "load_model_config", "load_native"]
