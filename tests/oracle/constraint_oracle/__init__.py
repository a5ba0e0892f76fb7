"""Asks the real Megatron-Core and Megatron Bridge packages for verdicts on candidates.

The packages are the published wheels, unzipped per version; each version and front end runs in
its own subprocess, on a machine without a GPU.
"""
