"""Every file of manifests/invalid has one mistake, and its first line says what is reported for it."""

from pathlib import Path

import pytest

from dagserve.errors import ManifestError
from dagserve.passes import check_manifest

FOLDER = Path(__file__).parent.parent / "manifests" / "invalid"
FILES = sorted(FOLDER.glob("*.yaml"))


def test_there_are_enough() -> None:
    assert len(FILES) >= 30


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_one_mistake_one_message(path: Path) -> None:
    expected = path.read_text().splitlines()[0].removeprefix("# expect: ")
    with pytest.raises(ManifestError) as caught:
        check_manifest(path, environment={})
    assert [str(d) for d in caught.value.diagnostics] == [f"{path}:{expected}"]
