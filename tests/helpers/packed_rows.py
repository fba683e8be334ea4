"""Rows of prompts with shared and own completions, of many lengths."""

from engine.training.model.packing import TokenRow


def group(prompt: tuple[int, ...], *completions: tuple[int, ...]) -> list[TokenRow]:
    return [TokenRow(prompt + completion, len(prompt)) for completion in completions]


ROWS = [
    *group((5, 9, 30, 31), (32, 40, 41), (50,), (51, 52, 53, 54, 55, 56, 57)),
    *group((7, 8, 60, 61, 62, 63, 64), (65, 66), (67, 68, 69)),
    *group((5, 9, 30, 31), (32, 40, 42, 43)),
    *group((11, 12, 13), (14, 15, 16)),
    *group((20,), (21, 22), (21, 22)),
]
