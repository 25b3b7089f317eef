# SPDX-License-Identifier: Apache-2.0
"""Reward servers written from the published protocols. Each scores the mean of the red channel that it got, over 255.

`SERVICES` is protocol -> (settings, service, exact): `exact` says that pixels arrive without loss.
"""

import base64
import io
import json
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
from aiohttp import web
from PIL import Image

TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")


def red(pixels: Any) -> float:
    """The score: mean of the red channel over 255."""
    return float(np.asarray(pixels, np.float64)[..., 0].mean()) / 255


class Service:
    """Base class: `answer` gets path and body; keeps the pictures that came, in order."""

    def __init__(self) -> None:
        self.pictures: list[np.ndarray] = []
        self.prompts: list[str] = []

    def decoded(self, file: bytes, formats: Sequence[str]) -> float:
        """Keep a picture -> its score."""
        self.pictures.append(np.asarray(Image.open(io.BytesIO(file), formats=formats)))
        return red(self.pictures[-1])

    def answer(self, path: str, body: bytes) -> web.Response:
        raise NotImplementedError


class GenevalService(Service):
    """app_geneval.py: reads JPEG only, needs `meta_datas` and `only_strict`."""

    def answer(self, path: str, body: bytes) -> web.Response:
        data = pickle.loads(body)
        scores = [self.decoded(file, ["jpeg"]) for file in data["images"]]
        metas = data["meta_datas"]
        self.prompts += [meta["prompt"] for meta in metas]
        strict = [1.0 if score > 0.5 and meta["include"] else 0.0 for score, meta in zip(scores, metas, strict=True)]
        loose = [0.0 if data["only_strict"] else np.float32(score > 0.25) for score in scores]
        groups = {
            tag: [one if meta["tag"] == tag else -10.0 for one, meta in zip(strict, metas, strict=True)] for tag in TAGS
        }
        found = {"scores": scores, "rewards": loose, "strict_rewards": strict, "group_rewards": groups}
        return web.Response(body=pickle.dumps({**found, "group_strict_rewards": groups}), content_type="text/html")


class OutputsService(Service):
    """DeQA, and UnifiedReward's old form where `prompts` is needed."""

    def __init__(self, needs_prompts: bool):
        super().__init__()
        self.needs_prompts = needs_prompts

    def answer(self, path: str, body: bytes) -> web.Response:
        data = pickle.loads(body)
        self.prompts += data["prompts"] if self.needs_prompts else []
        return web.Response(body=pickle.dumps({"outputs": [self.decoded(file, ["jpeg"]) for file in data["images"]]}))


class ScorerService(Service):
    """deepgen_rl's services: numpy scores, `{"error": str}` with status 500 if something is missing."""

    def answer(self, path: str, body: bytes) -> web.Response:
        data = pickle.loads(body)
        if not {"images", "prompts", "metadata"} <= set(data):
            return web.Response(status=500, body=pickle.dumps({"error": "Traceback: KeyError"}))
        self.prompts += data["prompts"]
        scores = np.array([self.decoded(file, ["jpeg"]) for file in data["images"]])
        return web.Response(body=pickle.dumps({"scores": list(scores), "twice": (scores * 2).tolist(), "note": "ok"}))


class FlowFactoryService(Service):
    """POST /compute."""

    def answer(self, path: str, body: bytes) -> web.Response:
        data = json.loads(body)
        if path != "/compute" or (data["image"] is None) == (data["video"] is None):
            return web.json_response({"detail": "wrong"}, status=422)
        self.prompts += data["prompt"]
        shots = data["video"] or [[one] for one in data["image"]]
        assert len(shots) == len(data["prompt"])
        rewards = [
            float(np.mean([self.decoded(base64.b64decode(frame), ["png"]) for frame in frames])) for frames in shots
        ]
        return web.json_response({"rewards": rewards})


SERVICES: dict[str, tuple[dict[str, Any], Any, bool]] = {
    "flow_grpo_geneval": ({"only_strict": False}, GenevalService, False),
    "flow_grpo_deqa": ({}, lambda: OutputsService(False), False),
    "unified_reward_remote": ({}, lambda: OutputsService(True), False),
    "http_scorer": ({}, ScorerService, False),
    "flow_factory": ({}, FlowFactoryService, True),
}
