"""Trials of Megatron Bridge held against the real package, without a GPU."""
