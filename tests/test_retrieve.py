"""manifests/retrieve.yaml with a tiny model: both runtimes, the plain search, HTTP, catalogs changed under load."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from catalog_reference import search
from conftest import MANIFEST
from random_models import SIZES, train_tokenizer, write_model
from test_beam_modules import logits_of
from test_server import serving
from tokenizers import AddedToken, Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

from dagserve.build.cache import BuildCache
from dagserve.compiler import compile_manifest
from dagserve.engine import Engine
from dagserve.errors import BuildError, InvalidRequest
from dagserve.runtime import ReferenceRuntime

RETRIEVE = MANIFEST.parent / "retrieve.yaml"
CODES = 8


def lines(seed: int, count: int, prefix: str) -> bytes:
    """A catalog of items such as ``<a_3><b_1><c_7>``, some of them shorter, some with the same path."""
    source, rows = Random(seed), []
    for i in range(count):
        codes = [f"<{level}_{source.randrange(CODES)}>" for level in "abc"[: source.choice((1, 2, 3, 3, 3))]]
        rows.append(json.dumps({"item": f"{prefix}-{i}", "text": "".join(codes)}))
    return "\n".join(rows).encode()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer()
    tokenizer.add_tokens([AddedToken(f"<{x}_{i}>", normalized=False) for x in "abc" for i in range(CODES)])
    write_model(folder, LlamaConfig(**{**SIZES, "vocab_size": tokenizer.get_vocab_size()}))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def compiled(folder: Path, model: Path, cache: BuildCache, content: bytes) -> Path:
    (folder / "items.jsonl").write_bytes(content)
    variables = {"model": str(model), "catalog": str(folder / "items.jsonl")}
    return compile_manifest(RETRIEVE, variables, output=folder / "artifact", cache=cache).artifact


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, model: Path, build_cache: BuildCache) -> Path:
    return compiled(tmp_path_factory.mktemp("retrieve"), model, build_cache, lines(1, 200, "sku"))


@pytest.fixture
def engine(artifact: Path) -> Iterator[Engine]:
    with Engine.load(artifact) as loaded:
        yield loaded


REQUESTS: list[Mapping[str, Any]] = [
    {"prompts": ["the cat"]},
    {"prompts": ["the cat", "yes"], "n": 16, "return_tokens": True, "return_scores": True},
    {"prompts": ["yes"], "deny": [f"sku-{i}" for i in range(100)]},
    {"prompts": ["yes"], "n": 16, "allow": ["sku-1", "sku-2", "sku-150", "gone", "日本 \ud800", ""], "deny": ["sku-2"]},
    {"prompts": ["yes"], "width": 1, "allow": ["gone"]},
]


@pytest.mark.parametrize("request_", REQUESTS, ids=range(len(REQUESTS)))
def test_both_runtimes_give_the_same_bytes(request_: Mapping[str, Any], artifact: Path, engine: Engine) -> None:
    assert engine.run(request_) == ReferenceRuntime(artifact).run(request_)


@pytest.mark.parametrize("width", [1, 4, 16])
def test_the_result_is_the_plain_searchs(width: int, engine: Engine, model: Path) -> None:
    torch_model = AutoModelForCausalLM.from_pretrained(model).train(False)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    rows = [json.loads(line) for line in lines(1, 200, "sku").splitlines()]
    items = {row["item"]: tuple(tokenizer.encode(row["text"]).ids) for row in rows}
    deny = [f"sku-{i}" for i in range(0, 200, 2)]
    request = {"prompts": ["the cat"], "width": width, "n": width, "deny": deny, "return_tokens": True}
    (result,) = json.loads(engine.run(request))["results"]
    permitted = items.keys() - set(deny)
    logits = logits_of(torch_model, tokenizer.encode("the cat").ids)
    expected = search(logits, items, permitted, width, 3, 0.0, "catalog")
    assert result["found"] == len(expected)
    assert [tuple(s["tokens"]) for s in result["sequences"]] == [tuple(h.tokens) for h in expected]
    for s in result["sequences"]:
        assert s["items"] == sorted(i for i in permitted if items[i] == tuple(s["tokens"]))
        assert s["text"] == tokenizer.decode(s["tokens"])


def test_an_empty_list_denies_nothing_and_allows_nothing(artifact: Path, engine: Engine) -> None:
    plain = engine.run_body(b'{"prompt": "yes"}')
    body = b'{"prompt": "yes", "deny": []}'
    assert engine.run_body(body) == ReferenceRuntime(artifact).run_body(body) == plain
    for runtime in (engine, ReferenceRuntime(artifact)):
        with pytest.raises(InvalidRequest, match="allow has 0 entries; it must have from 1 to 1000"):
            runtime.run_body(b'{"prompt": "yes", "allow": []}')


def test_what_the_catalog_lacks_is_said_not_filled(engine: Engine) -> None:
    few = json.loads(engine.run({"prompts": ["yes"], "n": 16, "allow": ["sku-3", "gone"]}))["results"][0]
    assert few["found"] == 1
    assert [s["items"] for s in few["sequences"]] == [["sku-3"]]


def post(client: httpx.Client, path: str, content: bytes = b"", kind: str = "application/x-ndjson") -> httpx.Response:
    return client.post(path, content=content, headers={"content-type": kind})


def all_items(reply: httpx.Response) -> list[str]:
    assert reply.status_code == 200, reply.text
    return [i for r in reply.json()["results"] for s in r["sequences"] for i in s["items"]]


def test_a_catalog_is_changed_and_brought_back(engine: Engine) -> None:
    with serving(engine) as client:
        ask = {"prompt": "the cat", "n": 16, "allow": [f"{kind}-{i}" for kind in ("sku", "new") for i in range(300)]}
        before = client.post("/v1/generate", json=ask)
        state = {"name": "items", "version": 1, "items": 200, "previous": None}
        assert client.get("/v1/catalogs").json() == {"catalogs": [state]}
        none = post(client, "/v1/catalogs/items/rollback")
        assert (none.status_code, none.json()["error"]["message"]) == (
            400,
            "catalog items has no version before this one",
        )
        reply = post(client, "/v1/catalogs/items", lines(2, 300, "new"))
        assert reply.json() == {"name": "items", "version": 2, "items": 300, "previous": 1}
        after = client.post("/v1/generate", json=ask)
        assert all(i.startswith("sku-") for i in all_items(before))
        assert all(i.startswith("new-") for i in all_items(after))
        assert post(client, "/v1/catalogs/items", lines(3, 10, "sku")).json()["previous"] == 2
        assert post(client, "/v1/catalogs/items/rollback").json() == {
            **state,
            "version": 2,
            "items": 300,
            "previous": 3,
        }
        assert client.post("/v1/generate", json=ask).content == after.content
        assert post(client, "/v1/catalogs/items/rollback").json()["version"] == 3


WRONG: Sequence[tuple[bytes, str, int, str]] = [
    (b"{", "application/x-ndjson", 400, "catalog.jsonl, line 1: not JSON"),
    (b'{"item":"a","tokens":[1,2,3,4]}', "application/x-ndjson", 400, "has too many tokens (4)"),
    (b'{"item":"a","text":"the cat sat on the mat"}', "application/x-ndjson", 400, "from 1 to max_depth, 3"),
    (b'{"item":"a","tokens":[100000]}', "application/x-ndjson", 400, "token 100000"),
    (b"", "application/x-ndjson", 400, "the catalog has 0 items"),
    (b"x", "application/vnd.apache.parquet", 400, "parquet"),
    (b"{}", "application/json", 415, "send one of application/x-ndjson"),
    (b" " * (1024 * 20100), "application/x-ndjson", 413, "the catalog is larger than"),
]


def test_a_wrong_catalog_changes_nothing(engine: Engine) -> None:
    with serving(engine) as client:
        ask = {"prompt": "the cat", "n": 16}
        before = client.post("/v1/generate", json=ask).content
        for content, kind, status, message in WRONG:
            reply = post(client, "/v1/catalogs/items", content, kind)
            assert reply.status_code == status, reply.text
            assert message in reply.json()["error"]["message"]
        missing = post(client, "/v1/catalogs/search", lines(2, 3, "new"))
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found")
        assert client.post("/v1/generate", json=ask).content == before
        assert client.get("/v1/catalogs").json()["catalogs"][0]["version"] == 1


def test_no_request_is_lost_or_mixed_while_catalogs_change(engine: Engine) -> None:
    """Requests in several threads while two catalogs take turns: every reply is of one of them."""
    ask = {"prompt": "the cat", "n": 16, "return_scores": True}
    failures: list[str] = []
    counts = [0, 0]
    stop = threading.Event()
    with serving(engine) as client:
        replies = [client.post("/v1/generate", json=ask).content]
        post(client, "/v1/catalogs/items", lines(2, 300, "new"))
        replies.append(client.post("/v1/generate", json=ask).content)
        assert replies[0] != replies[1]

        def keep_asking() -> None:
            while not stop.is_set():
                reply = client.post("/v1/generate", json=ask)
                if reply.content in replies:
                    counts[replies.index(reply.content)] += 1
                else:
                    failures.append(reply.text)

        threads = [threading.Thread(target=keep_asking) for _ in range(4)]
        for thread in threads:
            thread.start()
        changes = [post(client, "/v1/catalogs/items/rollback") for _ in range(60)]
        stop.set()
        for thread in threads:
            thread.join()
    assert [c.status_code for c in changes] == [200] * 60
    assert not failures
    assert min(counts) > 0


def test_a_catalog_that_does_not_fit_is_refused_at_compile(
    tmp_path: Path, model: Path, build_cache: BuildCache
) -> None:
    with pytest.raises(BuildError, match="is in the catalog twice"):
        compiled(tmp_path, model, build_cache, b'{"item":"a","text":"<a_1>"}\n{"item":"a","text":"<a_2>"}')
    with pytest.raises(BuildError, match="there is no file"):
        compile_manifest(RETRIEVE, {"model": str(model), "catalog": str(tmp_path / "no")}, cache=build_cache)


def test_a_token_outside_the_models_vocabulary_is_refused(tmp_path: Path, model: Path, build_cache: BuildCache) -> None:
    with pytest.raises(BuildError, match="item 'a' has token 500; tokens are from 0 to"):
        compiled(tmp_path, model, build_cache, b'{"item":"a","tokens":[500]}\n{"item":"b","tokens":[1]}')
    text = RETRIEVE.read_text().replace('file: "${catalog}", tokenizer: "${model}"', 'file: "${catalog}"')
    (tmp_path / "plain.yaml").write_text(text)  # without a tokenizer the search is the first to know
    variables = {"model": str(model), "catalog": str(tmp_path / "items.jsonl")}
    made = compile_manifest(tmp_path / "plain.yaml", variables, output=tmp_path / "made", cache=build_cache).artifact
    for runtime in (engine := Engine.load(made), ReferenceRuntime(made)):
        with pytest.raises(InvalidRequest, match=r"items.alphabets\[1\] is 500; it must be from 0 to"):
            runtime.run({"prompts": ["yes"]})
    engine.close()
