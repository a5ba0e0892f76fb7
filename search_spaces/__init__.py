"""Search spaces and ready jobs as YAML files, installed as package data.

`tuner.search.space.load_space(name)` reads a space, `tuner.job.load_job(name)` a job.
"""
