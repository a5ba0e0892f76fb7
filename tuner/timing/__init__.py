"""Step time: kernels, collectives and host launches of a profile, put together over a pipeline."""
