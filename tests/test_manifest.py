"""Reading manifests: YAML, variables, schema, the frozen model."""

import json
import re
from collections.abc import Mapping
from dataclasses import FrozenInstanceError
from pathlib import Path

import jsonschema
import pytest

from dagserve.errors import ManifestError
from dagserve.manifest import Manifest, Position, load_manifest, manifest_schema, print_manifest
from dagserve.manifest.yaml import resolve_plain

ROOT = Path(__file__).parent.parent
RELEVANCE = ROOT / "manifests" / "relevance.yaml"

SMALL = """\
apiVersion: dagserve/v1
name: small
bounds: {batch: 4, labels: 2}
inputs:
  labels: {type: "text[labels]", optional: true}
nodes:
  choose:
    engine: cpu
    op: resolve_labels
    with: {tokenizer: model, default: [a, b]}
    inputs: {labels: labels}
    outputs: {ids: "i64[labels]"}
outputs: {ids: choose.ids}
targets:
  cpu: {}
"""


def load(tmp_path: Path, text: str | bytes, **options: object) -> Manifest:
    path = tmp_path / "m.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_manifest(path, **{"environment": {}, **options})  # type: ignore[arg-type]


def mistakes(tmp_path: Path, text: str | bytes, **options: object) -> list[str]:
    with pytest.raises(ManifestError) as caught:
        load(tmp_path, text, **options)
    return [str(d).removeprefix(f"{tmp_path / 'm.yaml'}:") for d in caught.value.diagnostics]


def test_example_says_what_is_written() -> None:
    manifest = load_manifest(RELEVANCE, environment={})
    assert manifest.name == "relevance"
    assert {name: b.value for name, b in manifest.bounds.items()} == {
        "batch": 32, "tokens": 4096, "length": 512, "labels": 16
    }  # fmt: skip
    assert list(manifest.inputs) == ["query", "items", "labels", "label_token_ids", "apply_softmax"]
    assert manifest.inputs["query"].max_bytes == 8192
    assert manifest.inputs["apply_softmax"].default is False
    assert manifest.nodes["score"].options["checkpoint"] == "models/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert manifest.nodes["score"].inputs["tokens"].value == "tokenize.tokens"
    assert manifest.targets["cpu"].operators == {"attention": "torch"}
    assert (manifest.target, manifest.targets["cpu"].concurrency.in_flight) == ("cpu", 8)
    assert manifest.admission.max_wait_ms == 2000
    assert manifest.validation.tolerance == {"fp32": 1e-4, "bf16": 5e-2, "fp8": 0.4}


def test_positions_point_at_values(tmp_path: Path) -> None:
    manifest = load(tmp_path, SMALL)
    assert manifest.bounds["labels"].position == Position(3, 28)
    assert manifest.nodes["choose"].position == Position(7, 3)
    assert manifest.nodes["choose"].outputs["ids"].position == Position(12, 20)
    lines = SMALL.splitlines()
    at = manifest.outputs["ids"].position
    assert lines[at.line - 1][at.column - 1 :].startswith("choose.ids")


def test_columns_count_characters(tmp_path: Path) -> None:
    text = SMALL.replace("{batch: 4", '{"é𝄞é": 1, batch: 0')
    assert mistakes(tmp_path, text)[1].startswith("3:27: `bounds.batch` is 0")


def test_model_is_frozen(tmp_path: Path) -> None:
    manifest = load(tmp_path, SMALL)
    with pytest.raises(FrozenInstanceError):
        manifest.name = "other"  # type: ignore[misc]
    for mapping in (
        manifest.bounds,
        manifest.inputs,
        manifest.nodes,
        manifest.targets,
        manifest.nodes["choose"].options,
    ):
        with pytest.raises(TypeError):
            mapping["x"] = 1  # type: ignore[index]
    assert manifest.nodes["choose"].options["default"] == ("a", "b")


def test_defaults_match_the_schema(tmp_path: Path) -> None:
    manifest, definitions = load(tmp_path, SMALL), manifest_schema()["$defs"]
    for key, rule in definitions["admission"]["properties"].items():
        assert getattr(manifest.admission, key) == rule["default"], key
    for key in ("reference", "shapes", "inputs"):
        value = getattr(manifest.validation, key)
        assert (list(value) if isinstance(value, tuple) else value) == definitions["validation"]["properties"][key][
            "default"
        ]
    for key, rule in definitions["validation"]["properties"]["tolerance"]["properties"].items():
        assert manifest.validation.tolerance[key] == rule["default"]
    for key in ("device", "precision", "operators"):
        assert getattr(manifest.targets["cpu"], key) == definitions["target"]["properties"][key]["default"]


def test_tiers_that_are_left_out_follow_the_smaller_ones(tmp_path: Path) -> None:
    tiers = load(tmp_path, SMALL.replace("cpu: {}", "cpu: {concurrency: {runners: 3}}")).targets["cpu"].concurrency
    assert (tiers.runners, tiers.contexts, tiers.in_flight) == (3, 3, 12)


def walk(schema: object, path: str = "") -> list[tuple[str, Mapping[str, object]]]:
    found = []
    if isinstance(schema, dict):
        children = {**schema.get("properties", {}), **schema.get("$defs", {})}
        for name, item in children.items():
            found += [(f"{path}.{name}", item), *walk(item, f"{path}.{name}")]
        found += walk(schema.get("additionalProperties"), f"{path}.*")
    return found


def test_schema_is_valid_and_describes_every_field() -> None:
    schema = manifest_schema()
    jsonschema.Draft202012Validator.check_schema(dict(schema))
    fields = walk(schema)
    assert len(fields) > 50
    assert [path for path, item in fields if "description" not in item and "$ref" not in item] == []
    open_objects = [p for p, i in fields if i.get("type") == "object" and "additionalProperties" not in i]
    assert open_objects == [".node.with"]


def test_schema_in_the_package_is_the_one_editors_use() -> None:
    assert json.loads((ROOT / "schemas" / "manifest.schema.json").read_text()) == manifest_schema()
    first = RELEVANCE.read_text().splitlines()[0]
    assert (RELEVANCE.parent / first.split("$schema=")[1]).resolve() == ROOT / "schemas" / "manifest.schema.json"


@pytest.mark.parametrize(
    ("text", "value"),
    [("", None), ("~", None), ("null", None), ("true", True), ("False", False), ("yes", "yes"), ("on", "on"),
     ("012", 12), ("0o17", 15), ("0x1F", 31), ("-3", -3), ("1e-4", 1e-4), (".5", 0.5), ("1.", 1.0), (".inf", ".inf"),
     (".nan", ".nan"), ("1_000", "1_000"), ("12:30", "12:30"), ("1e999", "1e999"), ("9.0", 9.0), ("+7", 7)],
)  # fmt: skip
def test_plain_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    resolved = resolve_plain(text)
    assert resolved == value
    assert type(resolved) is type(value)


def test_variables_come_from_set_then_environment_then_default(tmp_path: Path) -> None:
    text = SMALL.replace("tokenizer: model", 'tokenizer: "${dir}/x"').replace(
        "bounds:", "variables: {dir: {default: fallback}}\nbounds:"
    )

    def value(**options: object) -> object:
        return load(tmp_path, text, **options).nodes["choose"].options["tokenizer"]

    assert value() == "fallback/x"
    assert value(environment={"dir": "env"}) == "env/x"
    assert value(environment={"dir": "env"}, variables={"dir": "set"}) == "set/x"
    assert value(variables={"dir": ""}) == "/x"
    assert value(variables={"dir": "${dir}"}) == "${dir}/x"


def test_environment_is_the_process_s_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGSERVE_TEST_DIR", "here")
    text = SMALL.replace("tokenizer: model", 'tokenizer: "${DAGSERVE_TEST_DIR}"')
    assert load(tmp_path, text, environment=None).nodes["choose"].options["tokenizer"] == "here"


def test_escaped_variable_stays(tmp_path: Path) -> None:
    text = SMALL.replace("tokenizer: model", 'tokenizer: "$${x} $5 $$"')
    assert load(tmp_path, text).nodes["choose"].options["tokenizer"] == "${x} $5 $$"


def test_variables_of_numbers_and_booleans(tmp_path: Path) -> None:
    text = SMALL.replace("batch: 4", 'batch: "${n}"').replace("optional: true", 'optional: "${o}"')
    manifest = load(tmp_path, text, variables={"n": "7", "o": "true"})
    assert manifest.bounds["batch"].value == 7
    assert manifest.inputs["labels"].optional is True
    quoted = mistakes(tmp_path, SMALL.replace("batch: 4", 'batch: "7"'))
    assert quoted == ["3:17: `bounds.batch` is text, but must be an integer; write an integer, for example `32`"]
    part = mistakes(tmp_path, text.replace("${n}", "${n}0"), variables={"n": "7", "o": "true"})
    assert part[0].startswith("3:17: `bounds.batch` is text")


def test_variable_of_a_number_stays_text_where_text_is_due(tmp_path: Path) -> None:
    text = SMALL.replace("name: small", "name: ${n}").replace("tokenizer: model", 'tokenizer: "${v}"')
    manifest = load(tmp_path, text, variables={"n": "n1", "v": "123"})
    assert manifest.nodes["choose"].options["tokenizer"] == "123"


def test_default_from_a_variable_takes_the_input_s_type(tmp_path: Path) -> None:
    text = SMALL.replace(
        "inputs:\n  labels", 'inputs:\n  a: {type: i64, default: "${v}"}\n  b: {type: text, default: "${v}"}\n  labels'
    )
    manifest = load(tmp_path, text, variables={"v": "12"})
    assert (manifest.inputs["a"].default, manifest.inputs["b"].default) == (12, "12")


def test_set_of_a_variable_nobody_knows(tmp_path: Path) -> None:
    text = SMALL.replace("bounds:", "variables: {model: {default: x}}\nbounds:")
    assert mistakes(tmp_path, text, variables={"modl": "x"}) == [
        "3:1: --set modl names a variable that is neither declared nor used; "
        "remove it, or use the variable; did you mean `model`?"
    ]
    load(tmp_path, text, variables={"model": "declared but unused"})


def test_unknown_target(tmp_path: Path) -> None:
    assert mistakes(tmp_path, SMALL, target="cpus") == ["14:1: no target `cpus`; use one of cpu; did you mean `cpu`?"]
    assert load(tmp_path, SMALL, target="cpu").target == "cpu"


def test_missing_file_and_directory(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(
            ManifestError, match=r":1:1: cannot read the manifest: .*; give the path of a manifest file"
        ):
            load_manifest(path)


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    assert mistakes(tmp_path, b"a: b\nc: \xff\n") == ["2:4: byte 0xff is not UTF-8; save the file as UTF-8"]


def test_byte_order_mark_and_windows_lines(tmp_path: Path) -> None:
    assert load(tmp_path, b"\xef\xbb\xbf" + SMALL.replace("\n", "\r\n").encode()) == load(tmp_path, SMALL)


def test_large_file(tmp_path: Path) -> None:
    assert "larger than 1048576 bytes" in mistakes(tmp_path, SMALL + "#" * (1 << 20))[0]


def test_billion_laughs(tmp_path: Path) -> None:
    rows = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)]
    assert mistakes(tmp_path, "\n".join(rows)) == ["2:10: alias `*a0` is not supported; write the value out"]


def test_deep_nesting(tmp_path: Path) -> None:
    assert "nested more than 32 deep" in mistakes(tmp_path, "a: " + "[" * 5000)[0]
    assert "nested more than 32 deep" in mistakes(tmp_path, "a: " + "[" * 40 + "]" * 40)[0]


@pytest.mark.parametrize(
    "text",
    [
        'a: "\\UFFFFFFFF"',
        'a: "\\ud800"',
        "%YAML 9.9\n---\na: 1",
        "a: !!python/object:os.system x",
        "a: !<",
        "? [a]\n: 1",
        "a: \0",
        "\x07",
        "&",
        "a: |99\n x",
        "- ",
        "'",
        "%TAG ! x\n--- !y 1",
    ],
)
def test_odd_yaml_is_refused(tmp_path: Path, text: str) -> None:
    assert mistakes(tmp_path, text)


def test_all_mistakes_come_together_in_file_order(tmp_path: Path) -> None:
    text = (
        SMALL.replace("batch: 4", "batch: 0")
        .replace("engine: cpu", "engine: gpu")
        .replace("cpu: {}", "cpu: {devise: cpu}")
    )
    found = mistakes(tmp_path, text)
    assert [line.split(": ")[0] for line in found] == ["3:17", "8:13", "15:9"]


def test_printed_form_loads_as_the_same_manifest(tmp_path: Path) -> None:
    text = SMALL.replace("[a, b]", '["\\0\\x85\\u2028", "$${x}: # \\" 𝄞"]')
    text += "validation: {metric: {name: auc, data: d}, performance: {max_p99_ms: 9}, inputs: [{labels: [x]}]}\n"
    for manifest in (load(tmp_path, text), load_manifest(RELEVANCE, environment={})):
        assert load(tmp_path, print_manifest(manifest)) == manifest
    assert load(tmp_path, SMALL) != load(tmp_path, text)


def test_the_page_describes_every_field() -> None:
    page = (ROOT / "docs" / "manifest.md").read_text()
    names = {path.rpartition(".")[2] for path, _ in walk(manifest_schema())} - {
        "identifier",
        "slug",
        "input",
        "node",
        "target",
    }
    assert sorted(name for name in names if not re.search(rf"`(\w+)?\.?{name}(\.\w+)?`", page)) == []


def test_a_name_with_a_newline_at_its_end(tmp_path: Path) -> None:
    found = mistakes(tmp_path, SMALL.replace("name: small", 'name: "small\\n"'))
    assert [line.split(";")[0] for line in found] == ["2:7: `name` is `small\\n`, which is not of the right form"]
