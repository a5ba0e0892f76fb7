"""Model specs: what a model is, how large it is, and how much arithmetic a step takes.

`get_model` reads the catalogue (`model_names`) or a mapping of fields; `from_hf_config` reads the
`config.json` of a Hugging Face model.
`count_parameters` and `model_flops_per_step` compute from a `ModelSpec`.

To add a model, put a file `NAME.yaml` (lower case, words joined by dashes) into
`tuner/models/catalogue/`; nothing else needs an edit:

    model:                  # Megatron-Core field names; defaults are Megatron-Core's own
      num_layers: 32
      ...
    source: where the architecture was read (document title or file, and its address)
    published_parameters:   # leave out when no total was published
      total: 8030261248
      definition: what the publisher counts
      relative_tolerance: 0.001
      source: where the figure was read
    aliases: [other spellings, if any]

The tests then compare the count with the published total and with the real `GPTModel`.
"""

from tuner.models.catalogue import get_model, model_names
from tuner.models.errors import ModelSpecError
from tuner.models.flops import model_flops_per_step
from tuner.models.huggingface import from_hf_config
from tuner.models.parameters import ParameterCounts, count_parameters
from tuner.models.spec import MODEL_FIELDS, MODEL_INPUTS, ModelSpec

__all__ = [
    "MODEL_FIELDS",
    "MODEL_INPUTS",
    "ModelSpec",
    "ModelSpecError",
    "ParameterCounts",
    "count_parameters",
    "from_hf_config",
    "get_model",
    "model_flops_per_step",
    "model_names",
]
