"""What one GPU does: training and decoding in tokens a second, beside stock vLLM and the base alone.

    python tests/gpu/figures.py trainer|engine [--shape dense|experts] [--rounds 5]

Random weights in the shapes of test_one_gpu.py, bfloat16. `trainer`: forward and backward of full
microbatches for one adapter and for four at once, and the share of what a large product reaches (8 operations
a parameter and token, since layers are computed again; of experts, those that a token goes to). `engine`: 64
requests decode at once, each with an adapter of its own of rank 8, and with none; the first answer of a new
adapter is timed, too. The servers take turns.
"""

import argparse
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
sys.path.insert(0, str(Path(__file__).parents[2]))
import decode

from engine.base.families import BaseShapes
from engine.base.resident import ensure_base
from engine.planning import gpu
from engine.settings.params import BaseConfig, Params, Paths
from engine.settings.services import EngineConfig, TrainerConfig
from engine.training.model.update import LossCall, forward_backward
from engine.training.service.app import load_base
from tests.gpu.test_one_gpu import LENGTH, RANK, TOKENS, rows, write_base
from tests.helpers.live import StockServer, free_port, start_engine, stop_engine

STOCK = ("-m", "vllm.entrypoints.openai.api_server")
# As vLLM runs on a GPU by itself: compiled, with CUDA graphs, and as many requests at once as are asked.
SHARE = (
    "--block-size", "16", "--gpu-memory-utilization", "0.25", "--no-enforce-eager", "--max-num-seqs", "64",
)  # fmt: skip


def trainer(base: Path, rounds: int) -> None:
    params = Params(
        state_dir=base.parent / "state",
        base={"name": str(base)},
        engine=EngineConfig(port=free_port(), max_model_len=LENGTH, max_rank=RANK),
        trainer=TrainerConfig(microbatch_tokens=TOKENS, sessions=4),
    )
    resident = load_base(params, base, gpu.planned(params))
    targets = tuple(BaseShapes.read(base).targets)
    made = [
        resident.new_adapter(RANK, 2.0 * RANK, targets, torch.Generator().manual_seed(i)) for i in range(4)
    ]
    data = rows(TOKENS // LENGTH, LENGTH)
    side = 8192
    left, right = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def seconds(call) -> float:
        found = []
        for _ in range(rounds + 1):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            found.append(time.perf_counter() - start)
        return median(found[1:])

    peak = 2 * side**3 / seconds(lambda: [left @ right for _ in range(10)]) * 10
    config = resident.model.config
    chosen = getattr(config, "num_experts_per_tok", 1) / getattr(config, "num_experts", 1)
    active = sum(
        parameter.numel() * (chosen if ".experts." in name else 1)
        for name, parameter in resident.model.named_parameters()
        if config.tie_word_embeddings or "embed_tokens" not in name
    )
    one = seconds(lambda: forward_backward(resident, [LossCall(made[0], data, "dapo", {})], lambda: None))
    each = [[data[i]] for i in range(4)]
    together = seconds(
        lambda: forward_backward(
            resident, [LossCall(a, d, "dapo", {}) for a, d in zip(made, each, strict=True)], lambda: None
        )
    )

    def apart() -> None:
        for a, d in zip(made, each, strict=True):
            forward_backward(resident, [LossCall(a, d, "dapo", {})], lambda: None)

    alone = seconds(apart)
    print(f"{torch.cuda.get_device_name()}: a large product reaches {peak / 1e12:.0f} TFLOP/s")
    print(f"one adapter: {TOKENS / one:.0f} tokens/s, {8 * active * TOKENS / one / peak:.3f} of the product")
    print(
        f"four adapters in one pass: {TOKENS / together:.0f} tokens/s; one after another {TOKENS / alone:.0f}"
    )


def engine(base: Path, rounds: int) -> None:
    shapes = BaseShapes.read(base)
    made = decode.adapters(shapes, torch.bfloat16)
    settings = {"max_model_len": 2048, "max_num_seqs": 64, "slots": 64, "max_rank": 8}
    root = base.parent
    with ExitStack() as stack:
        start = time.perf_counter()
        ours = start_engine(base, root / "served", wait_s=300, **settings)
        stack.callback(stop_engine, ours)
        print(f"our engine starts in {time.perf_counter() - start:.1f} s", flush=True)
        names = [ours.publish("decode", tensors, 8, torch.bfloat16) for tensors in made]
        sides = {"ours": (ours, names), "ours_base": (ours, [ours.base_name] * 64)}
        stock = {"stock_base": ([], ["stock"] * 64)}
        if not shapes.experts:
            paths = [decode.write(root / f"a{i}", tensors, "plain", shapes) for i, tensors in enumerate(made)]
            lora = [
                "--enable-lora", "--max-loras", "64", "--max-lora-rank", "8", "--lora-modules",
                *(f"a{i}={path}" for i, path in enumerate(paths)),
            ]  # fmt: skip
            stock["stock"] = (lora, [f"a{i}" for i in range(64)])
        for name, (more, asked) in stock.items():
            start = time.perf_counter()
            server = StockServer(base, "bfloat16", 2048, more=[*SHARE, *more], program=STOCK)
            sides[name] = (stack.enter_context(server), asked)
            print(f"{name} starts in {time.perf_counter() - start:.1f} s", flush=True)
        first = decode.seconds(ours, names[:1] * 64, 1, 16, 1)
        loads = [decode.seconds(ours, [name] * 64, 2, 16, 1) for name in names[1:17]]
        again = [decode.seconds(ours, [name] * 64, 3, 16, 1) for name in names[1:17]]
        print(f"first answers of an adapter: {median(loads):.4f} s, again {median(again):.4f} s")
        print(f"the very first answers: {first:.2f} s")
        for number in range(rounds + 1):
            for name, (server, asked) in sides.items():
                found = decode.speeds(server, asked, 1000 * number, True)
                print(number, name, {kind: round(value) for kind, value in found.items()}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", choices=["trainer", "engine"])
    parser.add_argument("--shape", default="dense")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="graftwork-gpu-"))
    try:
        tokenizer = ensure_base(BaseConfig(name="tiny-dense"), Paths(Path(".graftwork"))).path
        base = write_base(root / options.shape, options.shape, tokenizer)
        {"trainer": trainer, "engine": engine}[options.part](base, options.rounds)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
