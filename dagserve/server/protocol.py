"""Replies as the API's documentation shows them; CPU nodes write them. Requests are in :mod:`dagserve.endpoints`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel


class Usage(BaseModel):
    """Tokens of the request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ScoreReply(BaseModel):
    """One row of scores for each item, one score for each label; a score that is not finite is null."""

    scores: list[list[float | None]]
    model: str
    usage: Usage
    object: str = "scoring"


class Sequence(BaseModel):
    """One generated sequence; ``score`` is its cumulative log-probability over ``length ** length_penalty``.

    ``items`` are those of the catalog that it stands for, where the search is bound to one.
    """

    text: str
    score: float | None
    items: list[str] | None = None
    tokens: list[int] | None = None
    cumulative: float | None = None
    step_scores: list[float | None] | None = None


class Found(BaseModel):
    """The sequences of one prompt, best first: ``found`` of them, which may be fewer than were asked for."""

    found: int
    sequences: list[Sequence]


class GenerateReply(BaseModel):
    """One entry for each prompt."""

    results: list[Found]
    model: str
    usage: Usage
    object: str = "generation"


class Choice(BaseModel):
    """One sequence in OpenAI's form."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: str


class CompletionReply(BaseModel):
    """OpenAI's completion: the choices of all prompts in order, the best first of each."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


class Beam(BaseModel):
    """One sequence in SGLang's form."""

    text: str
    tokens: list[int]
    beam_score: float | None
    finish_reason: str


class BeamsMeta(BaseModel):
    """Usage of one prompt, and its sequences."""

    prompt_tokens: int
    completion_tokens: int
    beam_results: list[Beam]


class BeamsReply(BaseModel):
    """SGLang's reply to one prompt; several prompts get a list of them."""

    text: str
    meta_info: BeamsMeta


class EmbeddingUsage(BaseModel):
    """Tokens of the request."""

    prompt_tokens: int
    total_tokens: int


class Embedding(BaseModel):
    """The vector of one text."""

    object: str = "embedding"
    embedding: list[float | None]
    index: int


class EmbeddingsReply(BaseModel):
    """OpenAI's list of embeddings, in the order of the texts."""

    object: str = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Class(BaseModel):
    """The class of one text, and the scores of all of them."""

    index: int
    label: str
    probs: list[float | None]
    num_classes: int


class ClassifyReply(BaseModel):
    """vLLM's list of classes, in the order of the texts."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Class]
    usage: Usage


class Ranked(BaseModel):
    """One text of a rerank reply by its place in the request; the best first."""

    index: int
    score: float | None


REPLIES: Mapping[str, Any] = {
    "score": ScoreReply,
    "embeddings": EmbeddingsReply,
    "classify": ClassifyReply,
    "rerank": list[Ranked],
    "generate": GenerateReply,
    "completions": CompletionReply,
    "beams": BeamsReply | list[BeamsReply],
}
"""The reply of each endpoint."""


class ErrorDetail(BaseModel):
    """What went wrong."""

    type: str
    message: str
    node: str | None = None
    retry_after_ms: int | None = None


class ErrorReply(BaseModel):
    """Every error has this form."""

    error: ErrorDetail
