"""Ray Tune wiring: placement, launch and the life of a tuning run."""
