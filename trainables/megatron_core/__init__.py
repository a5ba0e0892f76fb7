"""Real training steps of the real Megatron-Core GPT model, on CUDA devices or the CPU.

Run by hand with `torchrun --nproc-per-node N -m trainables.megatron_core --spec FILE --output DIR`.
"""
