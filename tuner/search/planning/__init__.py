"""Estimates for whole spaces: few settings are profiled, all candidates are estimated from them."""
