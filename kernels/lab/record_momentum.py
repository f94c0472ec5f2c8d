"""Save the matrices that Newton–Schulz gets in a training run (Nesterov momentum) at a few steps.

    python -m kernels.lab.record_momentum --out momentum.pt --at 1,10,100,500 --preset corpus --steps 500 \\
        --micro_batches 1 --batch_tokens 32768,32768,32768

This trains on one device with train_gpt.py's settings until the last of these steps, and keeps twelve
matrices spread over the depth: four of Q, K and V of different layers, four of O and four of the MLPs'. The
file holds {"matrices": {name: {step: tensor}}, "losses": [one a step]}.
kernels.lab.polar_error reads it.
"""
import argparse
import sys
from collections.abc import Callable

import torch
from torch import Tensor

import train_gpt
from data.shards import ShardError
from records.run.settings import UserError

Matrices = dict[str, dict[int, Tensor]]


def chosen(count: int, kinds: list[str]) -> dict[int, str]:
    """Four of `count` matrices, at four depths: index -> name. Each layer has one of each kind, in order."""
    layers = count // len(kinds)
    depths = [round(i * (layers - 1) / 3) for i in range(4)]
    places = [(layer, i % len(kinds)) for i, layer in enumerate(depths)]
    return {layer * len(kinds) + kind: f"{kinds[kind]} {layer}" for layer, kind in places}


def recording(
    orthogonalise: Callable, matrices: Matrices, step: int, config: train_gpt.Config
) -> Callable:
    """`orthogonalise`, which also keeps copies of the chosen matrices under the number of the step."""
    def record(x: Tensor, *arguments) -> Tensor:
        blocks = len(x) // len(config.layers)  # for each layer: one of O, or those of Q, K and V
        # One block holds both Q and K where they are half as wide as V.
        qkv = [*(["Q", "K"] if blocks == 3 else ["QK"] * (blocks - 1)), "V"]
        in_mlp = x.shape[-2:] == (4 * config.width, config.width)
        kinds = ["MLP-in", "MLP-out"] if in_mlp else ["O"] if blocks == 1 else qkv
        for index, name in chosen(len(x), kinds).items():
            matrices.setdefault(name, {})[step] = x[index].to("cpu", copy=True)
        return orthogonalise(x, *arguments)
    return record


def capture(config: train_gpt.Config, at: list[int]) -> tuple[Matrices, list[float]]:
    """The chosen matrices at these steps (counted from 1) of a run on one device, and all losses."""
    trainer = train_gpt.Trainer(config, train_gpt.World())
    optimizer, matrices, losses = trainer.optimizer, {}, []
    ops = optimizer.ops
    steps = [trainer.schedule.at(index) for index in range(max(at))]
    for step, batches in zip(steps, trainer.loader.prefetch(range(max(at)))):
        optimizer.ops = ops
        if (number := step.index + 1) in at:
            recorded = recording(ops.newton_schulz, matrices, number, config)
            optimizer.ops = ops._replace(newton_schulz=recorded)
        losses.append(trainer.step(step, batches))
    return matrices, torch.stack(losses).tolist()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m kernels.lab.record_momentum", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--out", default="momentum.pt")
    parser.add_argument("--at", default="1,10,100,500", help="steps, counted from 1")
    options, settings = parser.parse_known_args(argv)
    try:
        config = train_gpt.parse(settings)[0]
        at = [int(step) for step in options.at.split(",")]
        if not 0 < min(at) <= max(at) <= (last := config.steps + config.extra_steps):
            raise UserError(f"--at {options.at}: steps are 1 ... {last}; raise --steps")
        matrices, losses = capture(config, at)
    except (UserError, ShardError) as error:
        sys.exit(f"kernels.lab.record_momentum: {error}")
    torch.save({"matrices": matrices, "losses": losses}, options.out)
    print(f"{len(matrices)} matrices at steps {options.at} in {options.out}: {', '.join(matrices)}")
    print("losses " + ", ".join(f"step {step}: {losses[step - 1]:.4f}" for step in at))
    return 0


if __name__ == "__main__":
    sys.exit(main())
