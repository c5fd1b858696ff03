"""Is any plan better than the one that the planner returns? Random plans, or all of a small space, priced one by one.

    python -m benchmarks.plan_search llama gpt2 mixtral vit resnet              500 random plans of each, on 16 ranks
    python -m benchmarks.plan_search llama --gpus 2 --plans 0                   every plan
    python -m benchmarks.plan_search llama --memory 2GiB --plans 100

A line of JSON each: the seconds of the best by the search and of the best that was drawn, their ratio (under 1: the
search missed one), how many were priced and how many fit, and the CPU seconds of the search. Every plan is priced by
layers that were compiled as it places them: what the search skips is seen here.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageClassification
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.resnet.configuration_resnet import ResNetConfig
from transformers.models.vit.configuration_vit import ViTConfig

from shardc.ir.hardware import Hardware
from shardc.plan.hardware import hardware as find_hardware
from shardc.plan.schema import Plan, read_bytes
from shardc.planner.candidate import Candidate
from shardc.planner.layer_costs import LayerCosts
from shardc.planner.search import SLACK, Priced, search
from shardc.planner.small_program import Subject
from shardc.planner.space import Limits, candidates
from shardc.planner.step_costs import estimate

LENGTH = 1024
BATCH = 64
TEXT: Mapping[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=16384,
        use_cache=False,
    ),
    "gpt2": lambda: GPT2Config(n_embd=1024, n_layer=8, n_head=16, use_cache=False),
    "mixtral": lambda: MixtralConfig(
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=8,
        vocab_size=16384,
        use_cache=False,
    ),
}
IMAGES: Mapping[str, Callable[[], Any]] = {
    "vit": lambda: ViTConfig(hidden_size=1024, num_hidden_layers=8, num_attention_heads=16, intermediate_size=4096),
    "resnet": lambda: ResNetConfig(),
}
MODELS = (*TEXT, *IMAGES)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def subject_of(name: str, hardware: Hardware) -> tuple[Subject, int]:
    """A model as the planner takes it, and the tokens of a row."""
    with torch.device("meta"):
        if name in TEXT:
            model: nn.Module = AutoModelForCausalLM.from_config(TEXT[name]())
            ids = torch.zeros(1, LENGTH, dtype=torch.long)
            batch, length = {"input_ids": ids, "labels": ids}, LENGTH
        else:
            model = AutoModelForImageClassification.from_config(IMAGES[name]())
            batch = {"pixel_values": torch.zeros(1, 3, 224, 224), "labels": torch.zeros(1, dtype=torch.long)}
            length = 1
    return Subject(model, batch, None, hardware, Plan.of(precision="bf16"), adamw), length


@dataclass(frozen=True)
class Outcome:
    """What the search chose, None where no plan fits, and the best of the plans that it is compared with."""

    chosen: Priced | None
    best: Priced | None
    tried: int
    fitting: int
    seconds: float

    @property
    def ratio(self) -> float:
        """0 where a plan fits and the search found none."""
        if self.best is None:
            return 1.0
        return 0.0 if self.chosen is None else self.best.seconds / self.chosen.seconds

    @property
    def holds(self) -> bool:
        """No plan is better by more than a prediction tells; none fits where the search found none."""
        return self.ratio >= 1 / (1 + SLACK)


def compare(subject: Subject, limits: Limits, plans: int, seed: int = 0) -> Outcome:
    """The search against so many random plans; 0: against every plan."""
    start = time.process_time()
    chosen = next(iter(search(subject, limits).fitting(limits.memory)), None)
    seconds = time.process_time() - start
    every = list(candidates(subject, limits))
    drawn = random.Random(seed).sample(every, min(plans, len(every))) if plans else every
    priced = [p for c in drawn if (p := price(subject, c)) is not None]
    fitting = [p for p in priced if p.estimate.memory.total <= limits.memory]
    best = min(fitting, key=lambda p: p.seconds, default=None)
    return Outcome(chosen, best, len(priced), len(fitting), seconds)


def price(subject: Subject, candidate: Candidate) -> Priced | None:
    """A candidate by its own compiled layers; None where it cannot be placed so."""
    costs = subject.costs(candidate.inner)
    if not isinstance(costs, LayerCosts):
        return None
    return Priced(candidate, estimate(candidate, costs, subject.hardware, subject.numbers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=MODELS)
    parser.add_argument("--gpus", type=int, default=16)
    parser.add_argument("--memory", default="80GiB")
    parser.add_argument("--hardware", default="h200-nvlink")
    parser.add_argument("--plans", type=int, default=500, help="0: every plan")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in options.models:
        subject, length = subject_of(name, find_hardware(options.hardware))
        limits = Limits(options.gpus, float(read_bytes(options.memory)), BATCH, length)
        outcome = compare(subject, limits, options.plans, options.seed)
        print(
            json.dumps(
                {
                    "model": name,
                    "chosen": None if outcome.chosen is None else str(outcome.chosen.candidate),
                    "ms": None if outcome.chosen is None else outcome.chosen.seconds * 1e3,
                    "best_of_drawn": None if outcome.best is None else str(outcome.best.candidate),
                    "ratio": outcome.ratio,
                    "holds": outcome.holds,
                    "tried": outcome.tried,
                    "fit": outcome.fitting,
                    "search_cpu_seconds": outcome.seconds,
                    "compiles": subject.compiles,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
