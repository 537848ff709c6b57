"""TorchTitan 0.2.2 integration: importing this registers the model converter ``"titan_offload"``, and the outputs that
TorchTitan's own models must save.

A train config names it in ``[experimental] custom_import`` and the converter in ``[model] converters``.
"""

from torchtitan.protocols.model_converter import register_model_converter

from titan_offload.titan.converter import OffloadConverter
from titan_offload.titan.models import register_builtin_saves

register_model_converter(OffloadConverter, "titan_offload")
register_builtin_saves()
