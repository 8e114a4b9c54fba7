"""manifests/suggest.yaml compiled with a tiny model: both runtimes, HTTP in three services' shapes, bad requests."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from beam_reference import Search
from conftest import MANIFEST
from test_beam_modules import logits_of
from test_server import serving
from tokenizers import Tokenizer
from tolerances import SCORES
from transformers import AutoModelForCausalLM

from dagserve.artifact import read_plan
from dagserve.build.cache import BuildCache
from dagserve.compiler import compile_manifest
from dagserve.engine import Engine
from dagserve.errors import CheckpointError, InvalidRequest, ManifestError
from dagserve.inspect import print_plan
from dagserve.nodes.beam import CatalogSearch
from dagserve.runtime import ReferenceRuntime

SUGGEST = MANIFEST.parent / "suggest.yaml"
PROMPTS = ["the cat sat", "a good film, a bad", "12 things", "yes"]


def compiled(folder: Path, model: Path, cache: BuildCache, *changes: tuple[str, str]) -> Path:
    text = SUGGEST.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "suggest.yaml").write_text(text)
    return compile_manifest(
        folder / "suggest.yaml", {"model": str(model)}, output=folder / "artifact", cache=cache
    ).artifact


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, build_cache: BuildCache) -> Path:
    return compiled(tmp_path_factory.mktemp("suggest"), tiny_model, build_cache)


@pytest.fixture(scope="module")
def engine(artifact: Path) -> Iterator[Engine]:
    with Engine.load(artifact) as loaded:
        yield loaded


REQUESTS: list[Mapping[str, Any]] = [
    {"prompts": PROMPTS[:1]},
    {"prompts": PROMPTS, "n": 16, "return_tokens": True, "return_scores": True},
    {"prompts": PROMPTS[1:3], "width": 1},
    {"prompts": PROMPTS[:2], "width": 3, "n": 2, "length_penalty": 0.0, "return_scores": True},
    {"prompts": ["日本語 é 👍"], "width": 16, "n": 1, "length_penalty": -1.5, "return_tokens": True},
]


@pytest.mark.parametrize("request_", REQUESTS, ids=range(len(REQUESTS)))
def test_both_runtimes_give_the_same_bytes(request_: Mapping[str, Any], artifact: Path, engine: Engine) -> None:
    assert engine.run(request_) == ReferenceRuntime(artifact).run(request_)


def found(engine: Engine, **request: Any) -> Any:
    body = json.loads(engine.run({"return_tokens": True, "return_scores": True, **request}))
    return [list(result["sequences"]) for result in body["results"]]


def test_a_batch_of_prompts_is_as_many_searches(engine: Engine) -> None:
    together = found(engine, prompts=PROMPTS, n=16)
    for prompt, sequences in zip(PROMPTS, together, strict=True):
        (alone,) = found(engine, prompts=[prompt], n=16)
        assert [s["tokens"] for s in sequences] == [s["tokens"] for s in alone]
        assert [s["score"] for s in sequences] == pytest.approx([s["score"] for s in alone], abs=1e-5)


@pytest.mark.parametrize("width", [1, 2, 7, 16])
def test_the_result_is_the_plain_searchs(width: int, engine: Engine, tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model).train(False)
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    for prompt, sequences in zip(PROMPTS, found(engine, prompts=PROMPTS, width=width), strict=True):
        ids = tokenizer.encode(prompt).ids
        stops = frozenset([model.config.eos_token_id])
        expected = Search(width, 4, stops, 0, 1.0).run(logits_of(model, ids), min(width, 5))
        assert [s["tokens"] for s in sequences] == [h.tokens for h in expected]
        assert [s["cumulative"] for s in sequences] == pytest.approx([h.cumulative for h in expected], abs=1e-3)
        assert [s["text"] for s in sequences] == [tokenizer.decode(h.tokens) for h in expected]


def test_equal_requests_get_equal_bytes_from_any_thread(engine: Engine) -> None:
    with ThreadPoolExecutor(8) as pool:
        bodies = set(pool.map(lambda _: engine.run({"prompts": PROMPTS, "n": 5}), range(40)))
    assert len(bodies) == 1


WRONG: list[tuple[Mapping[str, Any], str]] = [
    ({"prompts": PROMPTS, "width": 17}, "width is 17; it must be from 1 to 16"),
    ({"prompts": PROMPTS, "width": 0}, "width is 0; it must be from 1 to 16"),
    ({"prompts": PROMPTS, "n": 5, "width": 3}, "n is 5 but width is 3; lower n or raise width"),
    ({"prompts": PROMPTS, "n": 0}, "n is 0; it must be from 1 to 16"),
    ({"prompts": PROMPTS, "length_penalty": -100.0}, "length_penalty must be from -10 to 10"),
    ({"prompts": PROMPTS, "length_penalty": 10.001}, "length_penalty must be from -10 to 10"),
    ({"prompts": [*PROMPTS, "x"]}, "prompts has 5 entries; it must have from 1 to 4"),
    ({"prompts": ["x " * 400]}, "over max_length 128"),
    ({"prompts": [""]}, "has no tokens"),
]


@pytest.mark.parametrize(("request_", "message"), WRONG, ids=range(len(WRONG)))
def test_what_is_beyond_the_bounds_is_refused(
    request_: Mapping[str, Any], message: str, artifact: Path, engine: Engine
) -> None:
    for runtime in (engine, ReferenceRuntime(artifact)):
        with pytest.raises(InvalidRequest) as caught:
            runtime.run(request_)
        assert message in str(caught.value)


def test_a_width_of_two_ends_early_in_both_runtimes(tmp_path: Path, tiny_model: Path, build_cache: BuildCache) -> None:
    """The likeliest first token is a stop token, and a negative penalty makes whatever is longer worse."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model).train(False)
    ids = Tokenizer.from_file(str(tiny_model / "tokenizer.json")).encode(PROMPTS[0]).ids
    stop = int(logits_of(model, ids)([]).argmax())
    made = compiled(tmp_path, tiny_model, build_cache, (",4]", ",3]"), ("returned: 5", "returned: 2"),
                    ("width: 16, steps: 4", f"width: 2, steps: 3, stop_tokens: [{stop}]"))  # fmt: skip
    with Engine.load(made) as engine:
        for request in ({"prompts": PROMPTS[:1], "n": 1, "length_penalty": -5.0}, {"prompts": PROMPTS}):
            assert engine.run(request) == ReferenceRuntime(made).run(request)
        (sequences,) = found(engine, prompts=PROMPTS[:1], n=1, length_penalty=-5.0)
    expected = Search(2, 3, frozenset([stop]), 0, -5.0).run(logits_of(model, ids), 1)
    assert [s["tokens"] for s in sequences] == [h.tokens for h in expected] == [[stop]]


@pytest.fixture(scope="module")
def unrolled(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, build_cache: BuildCache) -> Path:
    change = ("width: 16, ", "width: 16, unrolled: true, ")
    return compiled(tmp_path_factory.mktemp("unrolled"), tiny_model, build_cache, change)


@pytest.mark.parametrize("request_", REQUESTS, ids=range(len(REQUESTS)))
def test_one_package_finds_the_same(request_: Mapping[str, Any], unrolled: Path, engine: Engine) -> None:
    """Of the search in steps, and the same bytes in both runtimes."""
    with Engine.load(unrolled) as whole:
        assert whole.run(request_) == ReferenceRuntime(unrolled).run(request_)
        for ours, theirs in zip(found(whole, **request_), found(engine, **request_), strict=True):
            assert [s["tokens"] for s in ours] == [s["tokens"] for s in theirs]
            assert [s["text"] for s in ours] == [s["text"] for s in theirs]
            for name in ("score", "cumulative"):
                assert [s[name] for s in ours] == pytest.approx([s[name] for s in theirs], abs=SCORES["fp32"])


def test_one_package_is_what_the_plan_says(unrolled: Path, artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, steps = read_plan(unrolled), read_plan(artifact)
    assert [p["name"] for p in plan["packages"]] == ["search.search"]
    (node,) = [n for n in plan["nodes"] if n["name"] == "search"]
    assert len(node["calls"]) == 1
    assert node["state"] == next(n["state"] for n in steps["nodes"] if n["name"] == "search")
    assert plan["weights"]["bytes"] <= steps["weights"]["bytes"], "one copy of the weights"
    print_plan(unrolled, False)
    printed = capsys.readouterr().out
    assert "search.search" in printed
    assert "prefix K/V" in printed


@pytest.mark.parametrize("penalty", [-5.0, 0.0, 1.0, 3.0])
def test_one_package_finds_the_same_where_the_other_ends_early(
    penalty: float, tmp_path: Path, tiny_model: Path, build_cache: BuildCache
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model).train(False)
    ids = Tokenizer.from_file(str(tiny_model / "tokenizer.json")).encode(PROMPTS[0]).ids
    stop = int(logits_of(model, ids)([]).argmax())
    options = f"width: 2, steps: 3, stop_tokens: [{stop}]"
    bodies = []
    for name, more in (("steps", ""), ("whole", ", unrolled: true")):
        (tmp_path / name).mkdir()
        made = compiled(tmp_path / name, tiny_model, build_cache, (",4]", ",3]"), ("returned: 5", "returned: 2"),
                        ("width: 16, steps: 4", options + more))  # fmt: skip
        with Engine.load(made) as engine:
            request = {"prompts": PROMPTS, "n": 2, "length_penalty": penalty}
            assert engine.run(request) == ReferenceRuntime(made).run(request)
            bodies.append(found(engine, **request))
    for ours, theirs in zip(*bodies, strict=True):
        assert [s["tokens"] for s in ours] == [s["tokens"] for s in theirs]
        assert [s["cumulative"] for s in ours] == pytest.approx([s["cumulative"] for s in theirs], abs=SCORES["fp32"])


def test_what_cannot_be_unrolled_is_refused() -> None:
    options = {"width": 4, "steps": 3, "returned": 2, "unrolled": True}
    with pytest.raises(ValueError, match=r"a catalog's search cannot be unrolled: .* leave it out"):
        CatalogSearch.interface(options, {})


def test_generate_over_http(artifact: Path, engine: Engine) -> None:
    with serving(engine) as client:
        both = [client.post("/v1/generate", json={key: "yes", "n": 2}) for key in ("prompt", "prompts")]
        assert both[0].status_code == 200, both[0].text
        assert both[0].content == both[1].content == engine.run({"prompts": ["yes"], "n": 2})
        twice = client.post("/v1/generate", json={"prompt": "a", "prompts": ["b"]})
        assert twice.json()["error"]["message"] == "prompts is given under two names; give one of them"
        schema = client.get("/openapi.json").json()["paths"]["/v1/generate"]["post"]["requestBody"]
        assert set(schema["content"]["application/json"]["schema"]["properties"]) == {
            "prompt", "prompts", "n", "width", "length_penalty", "return_tokens", "return_scores", "model",
        }  # fmt: skip
        assert client.get("/openapi.json").status_code == 200
    assert read_plan(artifact)["nodes"][1]["state"]["prefix K/V"] > 0


def test_completions_and_beams_over_http(tmp_path: Path, tiny_model: Path, build_cache: BuildCache) -> None:
    tokenizer = ('with: {tokenizer: "${model}"}', 'with: {tokenizer: "${model}", style: STYLE}')
    for style, path, body in (
        ("completions", "/v1/completions", {"prompt": ["yes", "no"], "use_beam_search": True, "n": 2, "best_of": 4,
                                            "max_tokens": 4, "temperature": 1.0, "model": "suggest"}),
        ("beams", "/generate", {"text": "yes", "sampling_params": {"beam_width": 4, "n": 2, "max_new_tokens": 4}}),
    ):  # fmt: skip
        changes = [("endpoint: generate", f"endpoint: {style}"), (tokenizer[0], tokenizer[1].replace("STYLE", style))]
        if style == "completions":
            served = (
                "  request_id: {type: text, optional: true, max_bytes: 128}\n  created: {type: i64, optional: true}\n"
            )
            changes += [
                ("inputs:\n  prompts", f"inputs:\n{served}  prompts"),
                (
                    "return_scores: return_scores",
                    "return_scores: return_scores\n      request_id: request_id\n      created: created",
                ),
            ]
        folder = tmp_path / style
        folder.mkdir()
        made = compiled(folder, tiny_model, build_cache, *changes)
        with Engine.load(made) as engine, serving(engine) as client:
            reply = client.post(path, json=body)
            assert reply.status_code == 200, reply.text
            reference = json.loads(ReferenceRuntime(made).run_body(json.dumps(body).encode()))
            if style == "completions":
                named = client.post(path, json=body, headers={"X-Request-Id": "x" * 129}), reply
                ids = [r.json()["id"].removeprefix("cmpl-") for r in named]
                assert ids == [r.headers["X-Request-Id"] for r in named]
                assert ids[0] != ids[1]
                assert 0 <= time.time() - reply.json()["created"] < 60
                refused = client.post(path, json={**body, "created": 1})
                assert refused.json()["error"]["message"].startswith("unknown field 'created'")
                reference |= {key: reply.json()[key] for key in ("id", "created")}
            assert reply.json() == reference
            if style == "completions":
                assert [c["index"] for c in reply.json()["choices"]] == [0, 1, 2, 3]
                wrong = client.post(path, json={**body, "max_tokens": 9})
            else:
                assert len(reply.json()["meta_info"]["beam_results"]) == 2
                wrong = client.post(path, json={"text": "yes", "sampling_params": {"max_new_tokens": 9}})
                for text, message in WRONG_BEAMS:
                    refused = client.post(path, content=text, headers={"content-type": "application/json"})
                    assert (refused.status_code, message in refused.text) == (400, True), (text, refused.text)
                    with pytest.raises(InvalidRequest) as caught:
                        ReferenceRuntime(made).run_body(text)
                    assert message in str(caught.value) or "JSON" in str(caught.value)
            assert wrong.status_code == 400
            assert "must be 4: a search has a fixed number of steps" in wrong.json()["error"]["message"]


WRONG_BEAMS = [
    (b'{"text":"a","sampling_params":nulx,"bogus":1}', "sampling_params"),
    (
        b'{"text":"a","sampling_params":{"n":1},"sampling_params":{"n":2}}',
        "sampling_params is given twice; give it once",
    ),
    (b'{"text":"a","sampling_params.n":1}', "unknown field 'sampling_params.n'"),
    (b'{"text":"a","sampling_params":{"n":1},"rid":tru}', "at or after rid"),
    (b'{"text":"a","rid":[{"a":[1,NaN]}]}', "at or after rid"),
    (b'{"text":"a","rid":{"a":"\\ud800"}}', "at or after rid"),
    (b'{"text":"a","rid":[1,2', "not valid JSON"),
    (b'{"text":"a","allow":{"item":["i"]}}', "allow.item is fixed by this service's manifest; leave it out"),
    (b'{"text":"a","allow":{"region":"de"}}', "allow is fixed by this service's manifest; leave it out"),
    (b'{"text":"a","' + b"p" * 9999 + b'":1}', "unknown field '" + "p" * 40 + "'; remove it"),
]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("returned: 5", "returned: 17"), "returned is 17; it must be at most width, 16"),
        (("steps: 4", "steps: 9"), "9"),
        (("steps: 4", "steps: 4, min_tokens: 5"), "min_tokens is 5; it must be at most steps, 4"),
        (("steps: 4", "steps: 4, stop_tokens: [7, 512]"), "stop_tokens has 512; the model's tokens are from 0 to 511"),
        (("width: 16", "width: 401"), "401"),
        (("i64[prompts,returned,4]", "i64[prompts,returned,5]"), "makes i64[P,R,4] (here i64[prompts,R,4])"),
    ],
)
def test_a_search_that_cannot_be_is_a_mistake_of_the_manifest(
    change: tuple[str, str], message: str, tmp_path: Path, tiny_model: Path, build_cache: BuildCache
) -> None:
    with pytest.raises((ManifestError, CheckpointError)) as caught:
        compiled(tmp_path, tiny_model, build_cache, change)
    assert message in str(caught.value)
