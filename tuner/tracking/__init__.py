"""MLflow records of studies and trials."""
