"""Tags by which runs of MLflow are found again."""

STUDY_TAG = "tuner.study_id"
TRIAL_TAG = "tuner.trial"
