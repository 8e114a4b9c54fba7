"""Tile sizes by GPU and shape."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

from dagserve.kernels import configs
from dagserve.kernels.configs import KernelConfig, load_config, upper_bound

DOCUMENT = {
    "gpu": "NVIDIA H200",
    "buckets": [
        {"when": {"tokens_at_most": 64, "head_dim": 64}, "use": {"BLOCK": 1}},
        {"when": {"tokens_at_most": 64}, "use": {"BLOCK": 2}},
        {"when": {}, "use": {"BLOCK": 3}},
    ],
}


@pytest.mark.parametrize(
    ("tokens", "head_dim", "block"), [(1, 64, 1), (64, 64, 1), (64, 128, 2), (65, 64, 3), (65, 1, 3)]
)
def test_the_first_bucket_that_admits_the_shape_wins(tokens: int, head_dim: int, block: int) -> None:
    assert KernelConfig.of(DOCUMENT).pick(tokens=tokens, head_dim=head_dim, width=7) == {"BLOCK": block}


def test_a_bucket_for_what_the_shape_does_not_have() -> None:
    with pytest.raises(ValueError, match="head_dim asks for head_dim; the shape has tokens"):
        KernelConfig.of(DOCUMENT).pick(tokens=1)


def test_the_last_bucket_admits_every_shape() -> None:
    with pytest.raises(ValueError, match="last bucket must have"):
        KernelConfig.of({**DOCUMENT, "buckets": DOCUMENT["buckets"][:2]})


@pytest.fixture
def an_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "an_op" / "configs"
    folder.mkdir(parents=True)
    (folder / "h200.json").write_text(json.dumps(DOCUMENT), "utf-8")
    (folder / "default.json").write_text(json.dumps({"gpu": "default", "buckets": [{"when": {}, "use": {}}]}), "utf-8")
    monkeypatch.setattr(configs, "_KERNELS", tmp_path)
    return "an_op"


def test_a_gpu_is_found_by_either_name(an_op: str) -> None:
    assert load_config(an_op, "h200") == load_config(an_op, "NVIDIA H200") == KernelConfig.of(DOCUMENT)


def test_an_unknown_gpu_gets_the_default_and_a_warning(an_op: str) -> None:
    with pytest.warns(UserWarning, match="not all tuned for NVIDIA L4.*run `dagserve tune-kernels` there"):
        assert load_config(an_op, "NVIDIA L4").gpu == "default"


def test_the_warning_comes_once_for_all_operators() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        load_config("attention", "NVIDIA L4")
        load_config("beam", "NVIDIA L4")
    assert [str(w.message).count("tune-kernels") for w in seen] == [1]


def test_a_file_of_ones_own_comes_first(an_op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own" / an_op / "configs"
    own.mkdir(parents=True)
    document = {"gpu": "NVIDIA H200", "buckets": [{"when": {}, "use": {"BLOCK": 9}}]}
    (own / "h200.json").write_text(json.dumps(document), "utf-8")
    assert load_config(an_op, "h200").pick(tokens=1, head_dim=64) == {"BLOCK": 1}
    monkeypatch.setenv(configs.OWN_CONFIGS, str(tmp_path / "own"))
    assert load_config(an_op, "h200").pick(tokens=1, head_dim=64) == {"BLOCK": 9}
    assert load_config(an_op, "default").gpu == "default"


def test_file_names() -> None:
    names = {"NVIDIA H200": "h200.json", "NVIDIA A100-SXM4-80GB": "a100-sxm4-80gb.json", "Tesla T4": "tesla-t4.json"}
    assert {gpu: configs.file_name(gpu) for gpu in names} == names


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_the_default_is_used_and_nothing_is_said(an_op: str) -> None:
    assert load_config(an_op).gpu == "default"


class Bounds(torch.nn.Module):
    """Keeps the bounds it sees while it is exported."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.seen = upper_bound(x.shape[0]), upper_bound(y.shape[0]), upper_bound(x.shape[1])
        return x.sum() + y.sum()


def test_bounds_of_exported_sizes() -> None:
    module = Bounds()
    sizes = ({0: torch.export.Dim("T", max=500)}, {0: torch.export.Dim.DYNAMIC})
    torch.export.export(module, (torch.zeros(8, 3), torch.zeros(9)), dynamic_shapes=sizes, strict=False)
    assert module.seen == (500, 2**31 - 1, 3)
