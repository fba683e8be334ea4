"""Compile constraints of answers within bounds of time and memory: a line of JSON in, one with the fault out.

    python -m engine.serving.gateway.grammar_process BASE CPU_S

A line is a list of [kind, text], as in `engine.serving.gateway.constraints`; the answer is null or what is
wrong. Each line is compiled in a fork, which the kernel ends at its limits; this process has no threads.
"""

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from engine.base.prompts import tokenizer_of
from engine.lean_imports import lean_imports

# Of one request's constraints together. A schema of 200 properties takes 3.4 s with a vocabulary of 150,000.
CPU_S = 5
DATA_BYTES = 4 << 30


def main() -> None:
    """Answer line by line until the input ends."""
    base, cpu_s = Path(sys.argv[1]), int(sys.argv[2])
    tokenizer_info = read_tokenizer(base)
    for line in sys.stdin:
        print(json.dumps(try_apart(tokenizer_info, json.loads(line), cpu_s)), flush=True)


def read_tokenizer(base: Path) -> Any:
    """Return xgrammar's view of a base's tokenizer, as vLLM makes it."""
    with lean_imports():
        import xgrammar

        words = tokenizer_of(base)
    config = json.loads((base / "config.json").read_text())
    size = (config.get("text_config") or config).get("vocab_size", len(words))
    return xgrammar.TokenizerInfo.from_huggingface(words, vocab_size=max(size, len(words)))


def try_apart(tokenizer_info: Any, constraints: list[list[str]], cpu_s: int) -> str | None:
    """Compile the constraints in a fork; return what is wrong, or None.

    What cannot be compiled at all is no fault here: vLLM says why, or has another backend compile it.
    """
    child = os.fork()
    if not child:
        os.nice(10)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
        try:
            compile_all(tokenizer_info, constraints)
        except MemoryError:
            os._exit(1)
        except Exception:
            os._exit(0)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return f"takes over {cpu_s} s of CPU time, or too much memory, to compile" if status else None


def compile_all(tokenizer_info: Any, constraints: list[list[str]]) -> None:
    """Compile each constraint in one thread, as vLLM does."""
    import xgrammar

    compiler = xgrammar.GrammarCompiler(tokenizer_info, max_threads=1, cache_enabled=False)
    for kind, text in constraints:
        if kind == "json":
            compiler.compile_json_schema(text)
        elif kind == "regex":
            compiler.compile_regex(text)
        elif kind == "choice":
            compiler.compile_grammar("root ::= " + " | ".join(map(json.dumps, json.loads(text))))
        elif kind == "structural_tag":
            compile_tag(compiler, text)
        else:
            compile_grammar(compiler, text)


def compile_tag(compiler: Any, text: str) -> None:
    """Compile a structural tag, in its old form too."""
    import xgrammar

    tag = json.loads(text)
    if "structures" not in tag:
        compiler.compile_structural_tag(text)
        return
    items = [
        xgrammar.StructuralTagItem(begin=one["begin"], schema=json.dumps(one["schema"]), end=one["end"])
        for one in tag["structures"]
    ]
    compiler.compile_structural_tag(items, tag["triggers"])


def compile_grammar(compiler: Any, text: str) -> None:
    """Compile a grammar in EBNF, or in Lark's syntax where it is none."""
    try:
        compiler.compile_grammar(text)
    except RuntimeError:
        compiler.compile_lark(text)


if __name__ == "__main__":
    main()
