"""Trials that are not run: figures from a formula, time that really passes.

For rehearsals of a study and tests of the tuner itself: the queue, the nodes, the records are the
real ones, and no GPU is needed. A measurement of a simulated trial says so in its versions.
"""

from trainables.simulated.run import run_simulated

__all__ = ["run_simulated"]
