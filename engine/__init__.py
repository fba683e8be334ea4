"""What the loop is made of: adapters, training, serving, quality. Knows nothing of Prefect or MLflow."""
