"""GPUs: how much memory, arithmetic and bandwidth they have, with the source of every figure.

To add a GPU, put a file `NAME.yaml` (lower case) into `tuner/hardware/gpus/`, with a `source`
beside every figure; nothing else needs an edit.
"""

from tuner.hardware.gpu import Gpu, get_gpu, gpu_names, read_entry

__all__ = ["Gpu", "get_gpu", "gpu_names", "read_entry"]
