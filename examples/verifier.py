"""A verifier: 1 for the bare number, 0.5 for an answer that ends with it, else 0.

    python examples/verifier.py

Training and scoring call the function of the option `--verifier` for each answer:

    graftwork policy create NAME --data FILE.jsonl --verifier python:examples.verifier:judge
"""


def judge(question: str, answer: str, text: str) -> float:
    """Return the reward of `text`, from 0 to 1; `answer` is the expected one."""
    words = text.rstrip(" .").split()
    if not words or words[-1] != answer:
        return 0.0
    return 1.0 if len(words) == 1 else 0.5


if __name__ == "__main__":
    for text in ("19", "12 + 7 = 19.", "The answer is 91."):
        print(judge("What is 12 + 7?", "19", text), text)
