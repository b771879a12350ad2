"""``bench describe`` and ``bench validate``: what a plan is and whether it can run, in closed form. No torch."""

from __future__ import annotations

import argparse
from typing import Any

from bench.cli import OK, USAGE, emit, problem_dicts, problem_text
from bench.spec import RunSpec, check, from_overrides
from trainer_core import counts
from trainer_core.config import ConfigError


def describe(spec: RunSpec) -> dict[str, Any]:
    """The figures of a plan; GiB are a rank's average, FLOPs a token are model FLOPs of forward and backward."""
    c, p = spec.config, spec.config.parallel
    total = counts.params(c.model)
    return {
        "run_id": spec.run_id,
        "params": total,
        "params_no_embedding": total - counts.embedding_params(c.model),
        "flops_per_token": {
            "full": counts.flops_per_token(c.model, c.data.seq_len, causal=False),
            "causal": counts.flops_per_token(c.model, c.data.seq_len, causal=True),
        },
        "tokens_per_step": c.tokens_per_step,
        "world_size": spec.world_size,
        "degrees": p.degrees,
        "microbatches": p.microbatches,
        "accumulation": c.accumulation,
        "reshard_after_forward": p.reshard,
        "layers_per_stage": [len(layers) for layers in c.stage_layers()],
        "state_gib": counts.state_gib(c),
        "float8": counts.float8_layers(c),
    }


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    p.add_argument("--json", action="store_true")


validate_arguments = add_arguments


def main(args: argparse.Namespace) -> int:
    data = describe(from_overrides(args.overrides))
    emit(data, args.json, _text(data))
    return OK


def _text(d: dict[str, Any]) -> str:
    degrees = " x ".join(f"{axis} {n}" for axis, n in d["degrees"].items() if n > 1) or "one rank"
    flops, state, float8 = d["flops_per_token"], d["state_gib"], d["float8"]
    lines = [
        f"parameters      {d['params']:,} ({d['params_no_embedding']:,} without the embedding)",
        f"model FLOPs     {flops['full']:.4g} a token (full attention), {flops['causal']:.4g} (causal)",
        f"ranks           {d['world_size']} = {degrees}; layers a stage {d['layers_per_stage']}",
        f"step            {d['tokens_per_step']:,} tokens; {d['accumulation']} accumulation x "
        f"{d['microbatches']} microbatches",
        f"state a rank    {state['total']:.2f} GiB: parameters {state['params']:.2f}, gradients {state['grads']:.2f}, "
        f"optimizer {state['optimizer']:.2f}",
    ]
    if float8["converted"]:
        skipped = ", ".join(f"{s['name']} ({s['reason']})" for s in float8["skipped"])
        lines.append(f"Float8          {len(float8['converted'])} layers; not {skipped}")
    return "\n".join(lines)


def validate(args: argparse.Namespace) -> int:
    """Exit code 0 for a plan that can run, 2 for one that can not."""
    try:
        errors, warnings = check(from_overrides(args.overrides))
    except ConfigError as error:
        errors, warnings = error.problems, []
    data = {"valid": not errors, "errors": problem_dicts(errors), "warnings": problem_dicts(warnings)}
    texts = [problem_text(errors), problem_text(warnings, "warning"), "" if errors else "valid"]
    emit(data, args.json, "\n".join(filter(None, texts)))
    return USAGE if errors else OK
