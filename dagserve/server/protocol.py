"""Bodies as the API's documentation shows them. Native code decodes and checks them, see :mod:`dagserve.endpoints`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr


class ScoreRequest(BaseModel):
    """Score each item against the query.

    Without softmax, a score is the full-vocabulary probability of the label after the prompt.
    """

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"query": "q", "items": ["a", "b"]}]})

    query: StrictStr = Field(description="Text put into the template's {query}.")
    items: list[StrictStr] | StrictStr = Field(description="One text, or a list: one row of scores each.")
    label_token_ids: list[StrictInt] | None = Field(None, description="Vocabulary ids to score; or give `labels`.")
    labels: list[StrictStr] | None = Field(None, description="Label texts, each exactly one token.")
    apply_softmax: StrictBool | None = Field(None, description="Softmax over the labels, so that a row sums to 1.")
    item_first: StrictBool = Field(False, description="Must be false: the manifest's template fixes the order.")
    model: StrictStr | None = Field(None, description="The served model's name, if given.")


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


class ErrorDetail(BaseModel):
    """What went wrong."""

    type: str
    message: str
    node: str | None = None
    retry_after_ms: int | None = None


class ErrorReply(BaseModel):
    """Every error has this form."""

    error: ErrorDetail
