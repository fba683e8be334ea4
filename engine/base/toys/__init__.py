"""Toy bases, which are built here: recipes, problems to learn from, and their pretraining."""
