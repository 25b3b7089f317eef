# SPDX-License-Identifier: Apache-2.0
"""Measure what steps before the window cost a group, with and without shared initial noise, and print a table.

    python examples/prefix_sharing.py [--samples 8] [--steps 10] [--starts 2,4,6] [--size 64] [--rounds 5]

The same sampler as in a replica, a window of two steps. With shared noise the steps before it run once for the group
(digen.sampling.shared_initial_noise); the two kinds of batches take turns, and the fastest of each is shown. The last
column is what fewer rows of the network leave at best: (start + 1 + (steps - start - 1) samples) / (steps samples).
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from verl_digen.algorithms.window import Window
from verl_digen.inputs import PromptInputs
from verl_digen.models import load_model
from verl_digen.models.tiny import build_tiny
from verl_digen.sampling.sampler import Sampler
from verl_digen.types import Geometry, SampleRequest, Sampling


def main() -> None:
    """Print seconds of generation for each start of the window."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="folder of a checkpoint; default: a tiny one")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--starts", default="2,4,6")
    parser.add_argument("--size", type=int, default=64, help="side of the picture in pixels")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        model = load_model(args.checkpoint or build_tiny("qwen_image", Path(folder) / "checkpoint"))
        device = torch.device(args.device)
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        network = model.load_transformer(dtype).requires_grad_(False).to(device)
        (condition,) = model.load_encoder(dtype, device)([PromptInputs("a red circle")])
    sampler = Sampler(model, network, run_seed=0, device=device, latents_dtype=torch.float32)
    shared = Sampling(Geometry(args.size, args.size), args.steps, 1.0, "flow", 0.7, shared_initial_noise=True)

    def seconds(sampling: Sampling, start: int) -> float:
        window = Window((start, start + 1), (start, start + 1))
        requests = [
            SampleRequest("g", index, PromptInputs("a red circle"), PromptInputs(" "), window, sampling)
            for index in range(args.samples)
        ]
        began_s = time.perf_counter()
        _, latents = sampler.sample(requests, [condition] * args.samples, None, version=0)
        latents.cpu()
        return time.perf_counter() - began_s

    apart = replace(shared, shared_initial_noise=False)
    seconds(apart, 0)
    print("window start | every row, s | shared prefix, s | share | rows of the network, share")
    for start in map(int, args.starts.split(",")):
        pairs = [(seconds(apart, start), seconds(shared, start)) for _ in range(args.rounds)]
        all_s, shared_s = min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)
        rows = (start + 1 + (args.steps - start - 1) * args.samples) / (args.steps * args.samples)
        print(f"{start:12} | {all_s:12.3f} | {shared_s:16.3f} | {shared_s / all_s:5.2f} | {rows:.2f}")


if __name__ == "__main__":
    main()
