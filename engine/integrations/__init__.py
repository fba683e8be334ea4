"""What keeps releases in step with other servers: aliases in MLflow, runs in Prefect."""
