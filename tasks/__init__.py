"""Prefect tasks: plain functions over engine/; ids and paths cross, tensors do not."""
