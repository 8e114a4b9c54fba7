"""``${name}`` in a manifest's values: from ``--set``, else the environment, else the variable's default."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from dagserve.errors import Diagnostic
from dagserve.manifest.source import Position, Source, did_you_mean, sentence
from dagserve.manifest.tree import Items, Scalar, Table, Tree, locate_key
from dagserve.manifest.yaml import is_unicode

_REFERENCE = re.compile(r"\$(\$\{)|\$\{([A-Za-z_][A-Za-z0-9_]*)\}|\$\{")
_WHOLE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")


def substitute(
    tree: Table, source: Source, given: Mapping[str, str], environment: Mapping[str, str]
) -> tuple[Table, list[Diagnostic]]:
    """Replaces every ``${name}`` in string values outside ``variables``; ``$${`` becomes ``${``.

    ``given`` are the ``--set`` values. A variable without a value, and a ``--set`` that nothing uses, is reported.
    """
    work = _Substitution(tree, source, given, environment)
    entries = tuple(e if e.key == "variables" else replace(e, value=work.tree(e.value)) for e in tree)
    work.check_given()
    return replace(tree, entries=entries), work.diagnostics


class _Substitution:
    def __init__(self, tree: Table, source: Source, given: Mapping[str, str], environment: Mapping[str, str]) -> None:
        section = tree.get("variables")
        self.declared = {e.key: e.value for e in section} if isinstance(section, Table) else {}
        self.section_at = locate_key(tree, "variables")
        self.source, self.given, self.environment = source, given, environment
        self.used: set[str] = set()
        self.diagnostics: list[Diagnostic] = []

    def tree(self, tree: Tree) -> Tree:
        if isinstance(tree, Table):
            return replace(tree, entries=tuple(replace(e, value=self.tree(e.value)) for e in tree))
        if isinstance(tree, Items):
            return replace(tree, values=tuple(map(self.tree, tree.values)))
        if not isinstance(tree.value, str):
            return tree
        return Scalar(self.text(tree.value, tree.position), tree.position, bool(_WHOLE.fullmatch(tree.value)))

    def text(self, text: str, at: Position, inside: tuple[str, ...] = ()) -> str:
        def value(match: re.Match[str]) -> str:
            if match[1]:
                return "${"
            if match[2]:
                return self.value(match[2], at, inside)
            self.report(at, "`${` opens no variable", "write `${name}`, or `$${` for the two characters")
            return ""

        return _REFERENCE.sub(value, text)

    def value(self, name: str, at: Position, inside: tuple[str, ...]) -> str:
        self.used.add(name)
        for values, where in ((self.given, f"--set {name}"), (self.environment, f"environment variable {name}")):
            if name in values:
                return self.checked(values[name], where, at)
        default = _default(self.declared.get(name))
        if name in inside:
            self.report(at, f"variable `{name}` refers to itself: {' -> '.join((*inside, name))}", "give it a value")
        elif default is not None:
            return self.text(default, at, (*inside, name))
        elif name in self.declared:
            self.report(at, f"variable `{name}` has no value", f"give it a default, or pass --set {name}=value")
        else:
            known = (*self.declared, *self.given)
            fix = sentence(f"declare it under `variables`, or pass --set {name}=value", did_you_mean(name, known))
            self.report(at, f"unknown variable `{name}`", fix)
        return ""

    def checked(self, value: str, where: str, at: Position) -> str:
        if is_unicode(value):
            return value
        self.report(at, f"{where} is not UTF-8 text", "set it again")
        return ""

    def check_given(self) -> None:
        for name in self.given:
            if name not in self.used and name not in self.declared:
                fix = sentence("remove it, or use the variable", did_you_mean(name, {*self.used, *self.declared}))
                message = f"--set {name} names a variable that is neither declared nor used"
                self.report(self.section_at, message, fix)

    def report(self, at: Position, message: str, fix: str) -> None:
        found = self.source.diagnostic(at, message, fix, "variable")
        if found not in self.diagnostics:
            self.diagnostics.append(found)


def _default(variable: Tree | None) -> str | None:
    default = variable.get("default") if isinstance(variable, Table) else None
    if not isinstance(default, Scalar) or default.value is None:
        return None
    return str(default.value).lower() if isinstance(default.value, bool) else str(default.value)
