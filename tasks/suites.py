"""Frozen evaluation suites: builds, opens and verifies them, and has the functions that lm-eval calls.

A suite is a directory under `eval_suites/`: lm-eval's YAML, `items.jsonl` (an item on each line: question,
answer, and the prompt as the chat template renders it) and a README with a change log. The YAML has the
items' version and digest, so that a score cannot come from other items than those of its version. The version
of the verifier's rule follows behind a point: scores by two versions of a rule are never compared.
`python -m tasks.suites` writes those of the policies in `params.yaml`, and on a tiny base those of families.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from engine.base.names import TOYS
from engine.base.prompts import answer_ids, prompt_text, tokenizer_of
from engine.base.resident import ensure_base
from engine.errors import ConfigError, Conflict, NotFound
from engine.problems.families import FAMILIES
from engine.problems.leaks import QuestionLine
from engine.problems.procedural import Problem, refuse_seen, stream
from engine.problems.rows import Asked, Message
from engine.problems.verifiers import RULES, Verifier
from engine.settings.own_functions import LIKELIHOODS
from engine.settings.params import load_params
from engine.settings.policies import PolicyConfig

SUITES = Path(__file__).parent.parent / "eval_suites"
ITEMS = "items.jsonl"
SEED = 20260513
COUNT, MAX_TOKENS = 200, 32
# Families that are scored by the probability of their answers; others have an answer generated.
READ_AS = {"circuit": "preference", "filter": "likelihood"}
# What a policy that keeps it must not lose: 20 items of each.
MIXED = "mixed"
MIXED_TASKS = (
    "addition", "sorting", "chain", "gcd", "bits", "island", "distances", "rotation", "spiral", "sudoku",
)  # fmt: skip
# The policy settings that decide whether an answer is right; the suite's YAML records them.
RULE = ("contract", "verifier", "verifier_timeout_s", "max_tokens")

TASK_YAML = """\
# Written by `{writer}`. Frozen: other items need a new version and a line in the README.
task: {name}
custom_dataset: !function tasks.suites.load_items
dataset_kwargs: {{suite: {name}}}
test_split: test
{output}
metric_list:
  - metric: reward
    aggregation: mean
    higher_is_better: true
metadata:
  version: {version}
  problems: {task}
  {rule}
  items: {count}
  digest: {digest}
"""
# What lm-eval asks for, by the verifier; other verifiers have an answer generated.
GENERATED = """\
output_type: generate_until
doc_to_text: prompt
doc_to_target: answer
process_results: !function tasks.suites.process_results
num_fewshot: 0
generation_kwargs:
  until: []            # the model's own end token stops it
  do_sample: false
  temperature: 0.0
  max_gen_toks: {max_tokens}
  add_special_tokens: false   # the prompt is rendered whole"""
READ = """\
output_type: {kind}
doc_to_text: prompt
{target}
target_delimiter: ""
process_results: !function tasks.suites.process_results
num_fewshot: 0"""
OUTPUTS = {
    "likelihood": READ.format(kind="loglikelihood", target="doc_to_target: target"),
    "preference": READ.format(
        kind="multiple_choice", target='doc_to_choice: "{{[target, rejected]}}"\ndoc_to_target: 0'
    ),
}


@dataclass(frozen=True)
class Item:
    """One frozen problem; `prompt_digest` is the sha256 of `prompt`, the text sent to the engine.

    Where the answer's probability is the score, `target` is its text with the end token, and `tokens` their
    count; `rejected` is the worse answer of a pair. `segment` is the kind of query.
    """

    id: str
    question: str
    answer: str
    prompt: str
    prompt_digest: str
    messages: tuple[Message, ...] = ()
    target: str = ""
    tokens: int = 0
    rejected: str = ""
    segment: str = ""

    @property
    def asked(self) -> Asked:
        """What the base's template renders to `prompt`."""
        return self.messages or self.question

    def stored(self) -> dict[str, Any]:
        """Return the item as its line has it: without fields that are empty by default."""
        return {name: value for name, value in asdict(self).items() if value or name not in OPTIONAL}


OPTIONAL = ("messages", "target", "tokens", "rejected", "segment")


@dataclass(frozen=True)
class Suite:
    """An opened suite; `digest` is the sha256 of its items file, `rule` how answers are judged.

    `version` is that of the items, such as `3`, and of the rule where it has changed since its first: `3.2`.
    """

    name: str
    version: str
    task: str
    rule: Mapping[str, Any]
    digest: str
    directory: Path
    items: tuple[Item, ...]

    @property
    def items_version(self) -> int:
        """Return the version of the items alone, which the suite's YAML has."""
        return int(self.version.partition(".")[0])

    @property
    def rule_version(self) -> int:
        """Return the version of the rule by which this code judges the answers."""
        return rule_version(self.rule)


def rule_version(rule: Mapping[str, Any]) -> int:
    """Return the version of a rule's verifier in `RULES`."""
    return RULES.get(rule.get("verifier", ""), 1)


def load_suite(name: str, root: Path = SUITES) -> Suite:
    """Open a suite and verify that its items match its version.

    Raises `NotFound` for an unknown suite, `ConfigError` when the items were changed.
    """
    directory = root / name
    if not (directory / ITEMS).is_file():
        known = ", ".join(known_suites(root)) or "none"
        raise NotFound(f"There is no suite {name!r} under {root}. Known suites: {known}.")
    meta = _read_yaml(directory / f"{name}.yaml")["metadata"]
    content = (directory / ITEMS).read_bytes()
    items_digest = hashlib.sha256(content).hexdigest()
    if items_digest != meta["digest"]:
        raise ConfigError(
            f"The items of the suite {name} have the digest {items_digest[:12]}, but version "
            f"{meta['version']} has {meta['digest'][:12]}. Restore {directory / ITEMS}, or freeze a new "
            "version."
        )
    items = tuple(_read_item(line) for line in content.splitlines())
    rule = {key: meta[key] for key in RULE if key in meta}
    judged = rule_version(rule)
    version = f"{meta['version']}.{judged}" if judged > 1 else str(meta["version"])
    return Suite(name, version, meta["problems"], rule, items_digest, directory, items)


def known_suites(root: Path = SUITES) -> list[str]:
    """Return the sorted names of the suites under `root`."""
    return sorted(path.parent.name for path in root.glob(f"*/{ITEMS}"))


def nothing(answer: str) -> tuple[str, int]:
    """Return the target of an answer whose probability is not the score."""
    return "", 0


def build_suite(
    name: str,
    task: str,
    contract: str,
    prompt: Callable[[Asked], str],
    *,
    count: int = COUNT,
    version: int = 1,
    max_tokens: int = MAX_TOKENS,
    root: Path = SUITES,
) -> Suite:
    """Freeze `count` problems of the `eval` split as a suite; the same arguments give the same bytes.

    `prompt` renders a question or chat by the template. Raises `Conflict` when this version exists with other
    items, since scores are recorded under it, and `ConfigError` where training would see one of them.
    """
    problems = list(islice(_unseen(task), count))
    refuse_seen(problems, SEED)
    return freeze(name, task, {"contract": contract}, problems, prompt, version, max_tokens, root)


def build_families(tokenizer: Any, root: Path = SUITES) -> Iterator[Suite]:
    """Freeze a suite of each of FAMILIES, and `MIXED` of generated tasks: a segment is one of them.

    Raises what `build_suite` raises.
    """

    def build(name: str, task: str, kind: str, problems: list[Problem]) -> Suite:
        refuse_seen(problems, SEED)
        is_read = kind in LIKELIHOODS
        target = partial(ended, tokenizer) if is_read else nothing
        rule = {"verifier" if is_read else "contract": kind}
        render = partial(prompt_text, tokenizer)
        return freeze(name, task, rule, problems, render, 1, MAX_TOKENS, root, target=target)

    for task in FAMILIES:
        kind = READ_AS.get(task, "terse")
        yield build(f"{task}-{kind}", task, kind, list(islice(_unseen(task), COUNT)))
    # Other items than those of the suites above.
    share = (COUNT, COUNT + COUNT // len(MIXED_TASKS))
    drawn = ((task, problem) for task in MIXED_TASKS for problem in islice(_unseen(task), *share))
    yield build(MIXED, MIXED, "terse", [replace(problem, segment=task) for task, problem in drawn])


def ended(tokenizer: Any, answer: str) -> tuple[str, int]:
    """Return an answer's text with the end token, and the number of tokens of both."""
    return answer + (tokenizer.eos_token or ""), len(answer_ids(tokenizer, answer))


def freeze(
    name: str,
    task: str,
    rule: Mapping[str, Any],
    problems: Iterable[Problem],
    prompt: Callable[[Asked], str],
    version: int,
    max_tokens: int,
    root: Path,
    writer: str = "python -m tasks.suites",
    target: Callable[[str], tuple[str, int]] = nothing,
) -> Suite:
    """Write problems as a suite under `root`; raises what `build_suite` raises.

    `target` returns an answer's text with the end token, and the number of tokens of both.
    """
    items = [_item(number, problem, prompt, target) for number, problem in enumerate(problems)]
    _refuse_faulty(name, items, str(rule.get("verifier", "")))
    content = "".join(json.dumps(item.stored()) + "\n" for item in items).encode()
    digest = hashlib.sha256(content).hexdigest()
    path = root / name / f"{name}.yaml"
    if path.exists():
        meta = _read_yaml(path)["metadata"]
        if meta["version"] == version and meta["digest"] != digest:
            raise Conflict(f"Version {version} of the suite {name} has other items. Give a new version.")
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / ITEMS).write_bytes(content)
    path.write_text(
        TASK_YAML.format(
            writer=writer,
            name=_scalar(name),
            task=_scalar(task),
            rule="\n  ".join(f"{key}: {value}" for key, value in rule.items()),
            count=len(items),
            version=version,
            digest=digest,
            output=OUTPUTS.get(rule.get("verifier", ""), GENERATED.format(max_tokens=max_tokens)),
        )
    )
    return load_suite(name, root)


def question_lines(items: Iterable[Item]) -> Iterator[QuestionLine]:
    """Yield the questions and answers of items, as leaks are found in them."""
    return (QuestionLine(f"the frozen item {item.id}", item.question, item.answer) for item in items)


def _refuse_faulty(name: str, items: Sequence[Item], verifier: str) -> None:
    """Raise `ConfigError` for an item that comes twice, or has no answer and no function that needs none."""
    seen: dict[tuple[str, ...], str] = {}
    for item in items:
        asked = f"The item {item.id} of the suite {name}, {item.question[:80]!r},"
        if not item.answer.strip() and not verifier.startswith("python:"):
            raise ConfigError(f"{asked} has no answer. Write it, or drop the item.")
        if first := seen.get(key := (item.prompt, item.answer, item.rejected)):
            raise ConfigError(f"{asked} is the item {first} again. Drop one: it would count twice.")
        seen[key] = item.id


def _scalar(text: str) -> str:
    """Return a text as a YAML scalar, quoted where needed: `no` and `null` are valid names."""
    return str(yaml.safe_dump(text)).splitlines()[0]


def load_items(suite: str, problems: str, root: str | Path = SUITES, **metadata: Any) -> dict[str, Any]:
    """Return a suite's documents for lm-eval, which calls this through the YAML with its metadata."""
    from datasets import Dataset

    rule = json.dumps({key: metadata[key] for key in RULE if key in metadata})
    items = [replace(item, messages=()).stored() for item in load_suite(suite, Path(root)).items]
    return {"test": Dataset.from_list([item | {"task": problems, "rule": rule} for item in items])}


def process_results(doc: dict[str, Any], results: list[Any]) -> dict[str, float]:
    """Score one completion for lm-eval with the verifier that training uses, or its log-probabilities.

    Of one answer (log-probability, is greedy) the score is the geometric mean probability of its tokens; of
    two it is whether the better one is likelier for its length in characters, as lm-eval's `acc_norm`.
    """
    verifier = json.loads(doc["rule"]).get("verifier")
    if verifier == "likelihood":
        return {"reward": math.exp(results[0][0] / doc["tokens"])}
    if verifier == "preference":
        better, worse = (found[0] / len(doc[side]) for found, side in zip(results, SIDES, strict=True))
        return {"reward": float(better > worse)}
    problem = Problem(doc["task"], doc["question"], doc["answer"])
    verdicts = verifier_of(doc["rule"]).judge([(problem, results[0])])
    faults.get().update(verdicts.errors)
    return {"reward": verdicts.scores[0]}


# The answers of a pair, as items have them.
SIDES = ("target", "rejected")
# The verifier's failures by kind in the current scoring, since lm-eval cannot return them.
faults: ContextVar[Counter[str]] = ContextVar("faults", default=Counter())  # noqa: B039


@cache
def verifier_of(rule: str) -> Verifier:
    """Return the verifier of a rule, written as JSON."""
    return Verifier(PolicyConfig(task="", suite="", **json.loads(rule)))


def _unseen(task: str) -> Iterator[Problem]:
    questions = set()
    for _, problem in stream(task, "eval", SEED):
        if problem.question not in questions:
            questions.add(problem.question)
            yield problem


def _item(
    number: int, problem: Problem, prompt: Callable[[Asked], str], target: Callable[[str], tuple[str, int]]
) -> Item:
    text, (ending, tokens) = prompt(problem.asked), target(problem.answer)
    digest = hashlib.sha256(text.encode()).hexdigest()
    rejected, _ = target(problem.rejected) if problem.rejected else ("", 0)
    return Item(
        f"{number:04d}", problem.question, problem.answer, text, digest, problem.messages,
        ending, tokens, rejected, problem.segment,
    )  # fmt: skip


def _read_item(line: bytes) -> Item:
    kept = json.loads(line)
    return Item(**kept | {"messages": tuple(kept.get("messages", ()))})


class _Loader(yaml.SafeLoader):
    """Loads lm-eval's YAML without importing the functions of its `!function` tags."""


_Loader.add_constructor("!function", lambda loader, node: node.value)


def _read_yaml(path: Path) -> dict[str, Any]:
    return dict(yaml.load(path.read_text(), _Loader))


def main() -> None:
    """Freeze the suites of `params.yaml` for its base's template, and of families if that is tiny."""
    params = load_params()
    tokenizer = tokenizer_of(ensure_base(params.base, params.paths).path)
    root, render = params.suites_dir, partial(prompt_text, tokenizer)
    own = (
        build_suite(one.suite, one.task, one.contract, render, root=root) for one in params.policies.values()
    )
    for suite in (*own, *(build_families(tokenizer, root) if params.base.name in TOYS else ())):
        print(f"{suite.name} version {suite.version}: {len(suite.items)} items, digest {suite.digest[:12]}")


if __name__ == "__main__":
    main()
