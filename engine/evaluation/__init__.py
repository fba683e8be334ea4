"""Evaluators of users' live answers while a release runs, in a process of their own."""
