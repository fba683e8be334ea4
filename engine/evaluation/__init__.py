"""Judgement of users' live answers, in a process of its own."""
