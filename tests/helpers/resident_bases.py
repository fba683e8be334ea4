"""Resident bases as the trainer's entry loads them, those with routed experts too."""

from functools import partial

from engine.training.model.experts import slotted_experts
from engine.training.model.lora import ResidentBase

resident = partial(ResidentBase, slot_experts=slotted_experts)
