"""manifests/retrieve.yaml with a tiny model: both runtimes, the plain search, HTTP, catalogs changed under load."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import httpx
import jsonschema
import pyarrow
import pytest
from catalog_reference import search
from conftest import MANIFEST
from prometheus_client.parser import text_string_to_metric_families
from pyarrow.parquet import write_table
from random_models import SIZES, train_tokenizer, write_model
from test_beam_modules import logits_of
from test_server import SCHEMA, fits, serving
from tokenizers import AddedToken, Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

from dagserve.build.cache import BuildCache
from dagserve.compiler import compile_manifest
from dagserve.endpoints import body_schema, fields_of
from dagserve.engine import Engine
from dagserve.errors import BuildError, Draining, InvalidRequest
from dagserve.runtime import ReferenceRuntime

RETRIEVE = MANIFEST.parent / "retrieve.yaml"
CODES = 8
COLOURS = ("red", "green", "blue", "日本")


def lines(seed: int, count: int, prefix: str) -> bytes:
    """A catalog of items such as ``<a_3><b_1><c_7>``, some of them shorter, some with the same path."""
    source, rows = Random(seed), []
    for i in range(count):
        codes = [f"<{level}_{source.randrange(CODES)}>" for level in "abc"[: source.choice((1, 2, 3, 3, 3))]]
        row = {"item": f"{prefix}-{i}", "text": "".join(codes), "stock": i % 3 > 0}
        rows.append(json.dumps(row if i % 7 == 0 else {**row, "colour": COLOURS[i % 4]}))
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
    {"prompts": ["yes", "the cat"], "n": 16, "allow_where": ["colour=red", "colour=日本", "stock=true"]},
    {"prompts": ["yes"], "n": 16, "allow": ["sku-1", "sku-4"], "allow_where": ["stock=true"], "deny": ["sku-4"]},
    {"prompts": ["yes"], "n": 16, "deny_where": ["stock=false", "colour=blue", "colour=gone"]},
    {"prompts": ["yes"], "n": 16, "deny_where": ["stock=false", "stock=true"]},
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


def brute_force(model: Path, permitted: set[str], prompt: str) -> list[list[str]]:
    """The items of each sequence that the plain search gives."""
    torch_model = AutoModelForCausalLM.from_pretrained(model).train(False)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    rows = [json.loads(line) for line in lines(1, 200, "sku").splitlines()]
    items = {row["item"]: tuple(tokenizer.encode(row["text"]).ids) for row in rows}
    found = search(logits_of(torch_model, tokenizer.encode(prompt).ids), items, permitted, 16, 3, 0.0, "catalog")
    return [sorted(i for i in permitted if items[i] == tuple(h.tokens)) for h in found]


def having(rows: Sequence[Mapping[str, Any]], keep: Any) -> set[str]:
    return {row["item"] for row in rows if keep(row)}


FILTERS: list[tuple[dict[str, Any], Any]] = [
    ({"allow": {"colour": ["red", "blue"], "stock": True}},
     lambda r: r.get("colour") in ("red", "blue") and r["stock"]),
    ({"allow": {"colour": "日本"}}, lambda r: r.get("colour") == "日本"),
    ({"deny": {"colour": ["red", "green"], "stock": [False]}},
     lambda r: r.get("colour") not in ("red", "green") and r["stock"]),
    ({"allow": {"item": ["sku-1", "sku-2", "sku-3"], "stock": True}}, lambda r: r["item"] in ("sku-1", "sku-2")),
    ({"allow": {"stock": True}, "deny": ["sku-1", "sku-2"]},
     lambda r: r["stock"] and r["item"] not in ("sku-1", "sku-2")),
    ({"deny": {"item": ["sku-1"], "colour": "blue"}}, lambda r: r["item"] != "sku-1" and r.get("colour") != "blue"),
    ({"allow": {}, "deny": {"colour": [], "stock": None}}, lambda _: True),
    ({"allow": {"stock": [True, False], "colour": None}}, lambda _: True),
    ({"allow": {"colour": "gone"}}, lambda _: False),
]  # fmt: skip


@pytest.mark.parametrize(("lists", "keep"), FILTERS, ids=range(len(FILTERS)))
def test_attributes_are_met_in_the_search(
    lists: dict[str, Any], keep: Any, artifact: Path, engine: Engine, model: Path
) -> None:
    body = json.dumps({"prompt": "the cat", "n": 16, **lists}).encode()
    fits("GenerateRequest", json.loads(body))
    given = {k: {a: v for a, v in x.items() if v is not None} if isinstance(x, dict) else x for k, x in lists.items()}
    jsonschema.validate({"prompt": "a", **given}, body_schema(engine.plan, "generate"))
    reply = engine.run_body(body)
    assert ReferenceRuntime(artifact).run_body(body) == reply
    rows = [json.loads(line) for line in lines(1, 200, "sku").splitlines()]
    expected = brute_force(model, having(rows, keep), "the cat")
    assert [s["items"] for s in json.loads(reply)["results"][0]["sequences"]] == expected


THERE = "there is item (text), colour (text), stock (bool)"
WRONG_LISTS: list[tuple[str, str]] = [
    ('{"allow": {"price": 3}}', f"unknown attribute 'allow.price'; {THERE}"),
    ('{"deny": {"item": ["a"], "Stock": true}}', f"unknown attribute 'deny.Stock'; {THERE}"),
    ('{"allow": {"%s": 3}}' % ("日本" * 20), f"unknown attribute 'allow.{'日本' * 6}日'; {THERE}"),
    ('{"allow": {"stock": "true"}}', "allow.stock must be true or false"),
    ('{"allow": {"stock": [true, 1]}}', "allow.stock[1] must be true or false"),
    ('{"allow": {"colour": true}}', "allow.colour must be text"),
    ('{"allow": {"colour": ["red", null]}}', "allow.colour[1] must be text"),
    ('{"allow": {"colour": {"a": 1}}}', "allow.colour must be"),
    ('{"allow": {"colour": []}}', "allow.colour"),
    ('{"allow": {"item": []}}', "allow.item has 0 entries; it must have from 1 to 1000"),
    ('{"allow": {"item": [3]}}', "allow.item[0] must be text"),
    ('{"allow": [{"stock": true}]}', "allow[0] must be text"),
    ('{"allow": true}', "allow must be a list"),
    ('{"allow": {"stock": true}, "allow": {"colour": "red"}}', "allow is given twice; give it once"),
    ('{"allow": ["a"], "allow": {"colour": "red"}}', "allow is given twice; give it once"),
    ('{"allow": {"stock": true, "stock": true}}', "allow.stock is given twice; give it once"),
    (json.dumps({"deny": {"colour": [str(i) for i in range(65)]}}), "deny.colour: all attributes have"),
    (json.dumps({"deny": {"colour": ["x" * 9000]}}), "deny.colour: all attributes have more than 8192 bytes of values"),
]


@pytest.mark.parametrize(("lists", "message"), WRONG_LISTS, ids=range(len(WRONG_LISTS)))
def test_wrong_lists_name_the_field_and_what_there_is(lists: str, message: str, artifact: Path, engine: Engine) -> None:
    body = b'{"prompt": "yes", ' + lists[1:].encode()
    with pytest.raises(InvalidRequest) as caught:
        engine.run_body(body)
    assert message in str(caught.value)
    with pytest.raises(InvalidRequest):
        ReferenceRuntime(artifact).run_body(body)
    assert engine.run_body(b'{"prompt": "yes"}'), "the next request is well"


def test_the_schema_of_a_service_has_its_attributes(engine: Engine) -> None:
    schema = body_schema(engine.plan, "generate")
    assert {*schema["properties"], "length_penalty"} == set(SCHEMA["$defs"]["GenerateRequest"]["properties"])
    ids, attributes = schema["properties"]["allow"]["anyOf"]
    assert ids["type"] == "array"
    assert set(attributes["properties"]) == {"item", "colour", "stock"}
    assert attributes["properties"]["stock"]["oneOf"][0] == {"type": "boolean"}
    for wrong in ({"stock": "true"}, {"colour": [1]}, {"price": 3}, {"item": 3}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"prompt": "a", "allow": wrong}, schema)


@pytest.mark.parametrize("endpoint", ["completions", "beams"])
def test_other_services_shapes_take_attributes(endpoint: str, engine: Engine) -> None:
    paths = {f.path: f.kind for f in fields_of(engine.plan, endpoint)}
    assert {k: v for k, v in paths.items() if "." in k and not k.startswith("sampling")} == {
        **{f"{name}.item": "input" for name in ("allow", "deny")},
        **{f"{name}.{a}": "term" for name in ("allow", "deny") for a in ("colour", "stock")},
    }


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
    (b"x", "application/vnd.apache.parquet", 400, "catalog.parquet: not readable as parquet after row 0"),
    (b'{"item":"a","tokens":[1],"price":3}', "application/x-ndjson", 400, "unknown key `price`; an item has"),
    (b'{"item":"a","tokens":[1],"stock":3}', "application/x-ndjson", 400, "line 1: `stock` must be true or false"),
    (b"{}", "application/json", 415, "send one of application/x-ndjson"),
    (b" " * (1024 * 20100), "application/x-ndjson", 413, "the catalog is larger than"),
]


def test_attributes_and_parquet_are_changed_and_brought_back(engine: Engine) -> None:
    """The same question has the answer of each version's attributes; a parquet upload is the JSONL one."""
    rows = [json.loads(line) for line in lines(2, 300, "new").splitlines()]
    columns = {name: [row.get(name) for row in rows] for name in ("item", "text", "stock", "colour")}
    stream = pyarrow.BufferOutputStream()
    write_table(pyarrow.table(columns), stream)
    parquet = stream.getvalue().to_pybytes()
    ask = {"prompt": "the cat", "n": 16, "allow": {"colour": "red"}, "deny": {"stock": False}}
    with serving(engine) as client:
        before = client.post("/v1/generate", json=ask)
        assert {i.split("-")[0] for i in all_items(before)} == {"sku"}
        assert post(client, "/v1/catalogs/items", lines(2, 300, "new")).json()["items"] == 300
        jsonl = client.post("/v1/generate", json=ask)
        kept = having(rows, lambda r: r.get("colour") == "red" and r["stock"])
        assert len(all_items(jsonl)) > 0
        assert set(all_items(jsonl)) <= kept
        kind = "application/vnd.apache.parquet"
        assert post(client, "/v1/catalogs/items", parquet, kind).json()["version"] == 3
        assert client.post("/v1/generate", json=ask).content == jsonl.content
        post(client, "/v1/catalogs/items", lines(1, 200, "sku"))
        assert client.post("/v1/generate", json=ask).content == before.content
        post(client, "/v1/catalogs/items/rollback")
        assert client.post("/v1/generate", json=ask).content == jsonl.content


def metrics_of(client: httpx.Client) -> dict[str, tuple[dict[str, str], float]]:
    """Labels and value of each metric of the one catalog."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {s.name: (s.labels, s.value) for f in families for s in f.samples if "catalog" in s.name}


def test_metrics_have_the_catalogs_version(engine: Engine) -> None:
    def expected(version: int, items: int, swaps: int) -> dict[str, Any]:
        name = {"catalog": "items"}
        return {
            "dagserve_catalog_info": ({**name, "version": str(version)}, 1),
            "dagserve_catalog_items": (name, items),
            "dagserve_catalog_swaps_total": (name, swaps),
        }

    with serving(engine) as client:
        assert metrics_of(client) == expected(1, 200, 0)
        post(client, "/v1/catalogs/items", lines(2, 300, "new"))
        assert metrics_of(client) == expected(2, 300, 1)
        post(client, "/v1/catalogs/items", b"{")
        assert metrics_of(client) == expected(2, 300, 1), "a refused one changes nothing"
        post(client, "/v1/catalogs/items/rollback")
        assert metrics_of(client) == expected(1, 200, 2)


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


def test_a_service_that_drains_ends_the_building_of_a_catalog(artifact: Path, tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    file.write_bytes(lines(2, 300, "new"))
    with Engine.load(artifact) as engine, ThreadPoolExecutor(1) as pool:
        build = pool.submit(engine.catalogs.install, "items", file)
        while engine.catalogs._builder is None:
            time.sleep(0.001)
        engine.catalogs.stop()
        with pytest.raises(Draining, match="is draining: the catalog was not put in"):
            build.result()
        with pytest.raises(Draining, match="takes no new catalogs"):
            engine.catalogs.install("items", file)
        assert engine.catalogs.state("items")["version"] == 1


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
    text = RETRIEVE.read_text().replace('      tokenizer: "${model}"\n', "")
    (tmp_path / "plain.yaml").write_text(text)  # without a tokenizer the search is the first to know
    variables = {"model": str(model), "catalog": str(tmp_path / "items.jsonl")}
    made = compile_manifest(tmp_path / "plain.yaml", variables, output=tmp_path / "made", cache=build_cache).artifact
    for runtime in (engine := Engine.load(made), ReferenceRuntime(made)):
        with pytest.raises(InvalidRequest, match=r"items.alphabets\[1\] is 500; it must be from 0 to"):
            runtime.run({"prompts": ["yes"]})
    engine.close()
