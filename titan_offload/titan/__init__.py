"""TorchTitan 0.2.2 integration: importing this registers the model converter ``"titan_offload"``.

A train config names it in ``[experimental] custom_import`` and the converter in ``[model] converters``.
"""

from torchtitan.protocols.model_converter import register_model_converter

from titan_offload.titan.converter import OffloadConverter

register_model_converter(OffloadConverter, "titan_offload")
