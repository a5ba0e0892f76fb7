"""The best configuration of a study in MLflow's model registry, under an alias."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tuner.tracking.names import STUDY_TAG

if TYPE_CHECKING:
    from mlflow import MlflowClient

_LOG = logging.getLogger(__name__)
ALIAS = "best"
_EXPORTS = "exports"


def register_best(client: MlflowClient, name: str, run_id: str, study_id: str) -> None:
    """Make the run's `exports` folder a version of the registered model `name`, with the alias.

    A study has one version however often it is written; the alias moves to the study that ended
    last. A store without a registry, or one that refuses, loses nothing else: that is logged.
    """
    from mlflow.exceptions import MlflowException

    try:
        _register(client, name, run_id, study_id)
    except MlflowException as error:
        _LOG.warning("MLflow did not register the best configuration as %s: %s", name, error)


def _register(client: MlflowClient, name: str, run_id: str, study_id: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.get_registered_model(name)
    except MlflowException:
        client.create_registered_model(
            name, description="Training configurations found by `tuner tune`, in every export form."
        )
    known = client.search_model_versions(f"name = '{name}'")
    version = next((one.version for one in known if one.tags.get(STUDY_TAG) == study_id), None)
    if version is None:
        made = client.create_model_version(
            name, f"runs:/{run_id}/{_EXPORTS}", run_id=run_id, tags={STUDY_TAG: study_id}
        )
        version = made.version
    client.set_registered_model_alias(name, ALIAS, str(version))
