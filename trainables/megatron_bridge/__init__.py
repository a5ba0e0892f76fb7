"""Trials of Megatron Bridge recipes: the candidate as overrides, mock data, a few steps.

Run by hand with `torchrun --nproc-per-node N -m trainables.megatron_bridge --spec FILE --output
DIR`. Works with the Megatron Bridge releases 0.3 to 0.6, which pair with Megatron-Core 0.16 to
0.19; all have training callbacks, and where a build has none the log lines are read.
"""
