"""The same endpoint over transformers in eager FP32: what a user has without compiling anything.

Two routes over one model, so that it is loaded once: ``/single/v1/score`` runs one text at a time,
``/batched/v1/score`` one right-padded batch a request. One worker thread runs the model with every core, one request
after another; several at once would only share the same cores.
Run as ``python -m perf.baseline --model MODEL --artifact ARTIFACT``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import torch
import uvicorn
from fastapi import FastAPI, Response
from pydantic import BaseModel

from demo.peer import load_transformers
from demo.run import LABELS
from perf.workload import prompt_template


class ScoreBody(BaseModel):
    """The fields of ``POST /v1/score`` that the benchmark sends."""

    query: str
    items: list[str]
    labels: list[str] = list(LABELS)
    apply_softmax: bool = True


class Baseline:
    """A causal model and its tokenizer; both methods give softmax scores ``[texts, labels]`` and the prompt tokens."""

    def __init__(self, model: str, template: Sequence[dict[str, str]]) -> None:
        self._model, self._tokenizer = load_transformers(model)
        self._template = template

    def single(self, body: ScoreBody) -> tuple[list[list[float]], int]:
        """One text at a time; the LM head runs on the last position only."""
        labels, prompts = self._label_ids(body), self._prompts(body)
        with torch.inference_mode():
            logits = [
                self._model(torch.tensor([ids]), logits_to_keep=1, use_cache=False).logits[0, -1] for ids in prompts
            ]
            scores = torch.stack(logits)[:, labels].softmax(-1)
        return scores.tolist(), sum(map(len, prompts))

    def batched(self, body: ScoreBody) -> tuple[list[list[float]], int]:
        """One right-padded batch with its attention mask; the LM head runs on each row's last position only."""
        labels, prompts = self._label_ids(body), self._prompts(body)
        lengths = torch.tensor([len(ids) for ids in prompts])
        width = int(lengths.max())
        tokens = torch.tensor([ids + [0] * (width - len(ids)) for ids in prompts])
        mask = (torch.arange(width) < lengths[:, None]).long()
        with torch.inference_mode():
            hidden = self._model.base_model(tokens, attention_mask=mask, use_cache=False).last_hidden_state
            last = hidden[torch.arange(len(prompts)), lengths - 1]
            scores = self._model.get_output_embeddings()(last)[:, labels].softmax(-1)
        return scores.tolist(), int(lengths.sum())

    def _prompts(self, body: ScoreBody) -> list[list[int]]:
        texts = [
            "".join(
                part.get("literal") or {"query": body.query, "item": item}[part["field"]] for part in self._template
            )
            for item in body.items
        ]
        return [encoding.ids for encoding in self._tokenizer.encode_batch(texts, add_special_tokens=False)]

    def _label_ids(self, body: ScoreBody) -> list[int]:
        return [self._tokenizer.encode(label, add_special_tokens=False).ids[0] for label in body.labels]


def create_app(baseline: Baseline) -> FastAPI:
    """Both routes and ``/health``."""
    app = FastAPI()
    worker = ThreadPoolExecutor(1)  # the lock: one request at a time, always on the thread that owns the OpenMP team

    async def answer(score: Callable[[ScoreBody], tuple[list[list[float]], int]], body: ScoreBody) -> Response:
        scores, tokens = await asyncio.get_running_loop().run_in_executor(worker, score, body)
        usage = {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
        reply = {"scores": scores, "model": "baseline", "usage": usage, "object": "scoring"}
        return Response(orjson.dumps(reply), media_type="application/json")

    @app.post("/single/v1/score")
    async def single(body: ScoreBody) -> Response:
        return await answer(baseline.single, body)

    @app.post("/batched/v1/score")
    async def batched(body: ScoreBody) -> Response:
        return await answer(baseline.batched, body)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok"}

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="model directory or .gguf file")
    parser.add_argument("--artifact", type=Path, required=True, help="artifact whose template is used")
    arguments = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    app = create_app(Baseline(arguments.model, prompt_template(arguments.artifact)))
    # asyncio turns Nagle's delay off only for sockets that name their protocol.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(2048)
        print(f"baseline: on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=75, lifespan="off")
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
