"""A base with several end tokens: trainer, rollouts and scoring stop at the same one."""

from pathlib import Path

from engine.base.prompts import end_tokens, prompt_text
from engine.settings.params import Params
from engine.training.model.lora import ResidentBase
from engine.training.model.packing import TokenRow
from tests.helpers.end_tokens import prompts_of
from tests.helpers.live import RunningEngine


def answer_of(row: TokenRow, ends: tuple[int, ...]) -> list[int]:
    tokens = list(row.tokens[row.start :])
    return tokens[:-1] if tokens[-1] in ends else tokens


def test_every_end_token_ends_rollouts_and_scores(crowded: RunningEngine, tmp_path: Path) -> None:
    """The rollout holds it, to learn from."""
    from transformers import AutoTokenizer

    from engine.training.sample_groups import Sampling, sample_groups
    from tasks.score import score
    from tasks.suites import build_suite

    path = crowded.base_path
    base, tokenizer = ResidentBase(path, 1, 512), AutoTokenizer.from_pretrained(path)
    prompts = prompts_of(path)
    ends = end_tokens(path)
    first, second = ends
    assert first == tokenizer.eos_token_id
    greedy = Sampling(group_size=2, max_tokens=12, temperature=1e-4)
    groups = sample_groups(crowded.url, crowded.key, crowded.base_name, prompts, greedy)
    suite = build_suite(
        "ends", "addition", "terse", lambda text: prompt_text(tokenizer, text), count=4, root=tmp_path,
        max_tokens=12,
    )  # fmt: skip
    params = Params.model_validate(
        {
            "base": {"name": str(path)},
            "state_dir": crowded.state,
            "suites_dir": str(tmp_path),
            "engine": {"port": int(crowded.url.rpartition(":")[2])},
        }
    )
    scored = score(params, "sums", None, "ends", crowded.key)
    for row, group in zip(base.greedy(None, prompts, ends, 12), groups, strict=True):
        assert {sample.tokens for sample in group} == {row.tokens[row.start :]}
        assert all(len(sample.logprobs) == len(sample.tokens) for sample in group)
    assert groups[0][0].tokens[-1] == second
    asked = [tokenizer.encode(item.prompt, add_special_tokens=False) for item in suite.items]
    rows = base.greedy(None, asked, ends, 12)
    answers = [tokenizer.decode(answer_of(row, ends), skip_special_tokens=True) for row in rows]
    assert [item.answer for item in scored.items] == answers
    assert any(row.tokens[-1] == second for row in rows)
